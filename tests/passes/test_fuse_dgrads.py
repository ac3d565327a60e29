"""fuse_dgrads: input gradients of rows that picked their weights; forward keeps no weight for each row."""

import pytest
import torch
from expecttest import assert_expected_inline
from tiny_models import (
    BF16,
    EXPERTS,
    IN,
    OUT,
    ROWS,
    WORLD,
    assert_unchanged_by,
    behind,
    hand_written,
    listing,
    nodes,
    ops,
    partitioned,
)
from torch import Tensor, fx

from gtp_compile.testing import JointGraph, compare_numerics

aten = torch.ops.aten
gtp = torch.ops.gtp

MODELS = ("batched_experts", "batched_experts_transposed")
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads")


def matrices_of_rows(graph: fx.Graph) -> list[fx.Node]:
    """Every tensor of a matrix for each row."""
    sizes = {(ROWS, OUT, IN), (ROWS, IN, OUT)}
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    return [n for n in tensors if tuple(n.meta["val"].shape) in sizes]


def materialize(shard: Tensor) -> Tensor:
    layout = (["0"], [WORLD], 1, WORLD * shard.shape[1], "avg")
    return gtp.materialize.default([shard], [None], *layout, BF16, torch.float32)


def dgrad_graph(dgrad, weight: tuple[int, int], *operands: Tensor) -> JointGraph:
    """A gathered weight `[E, *weight]` and its input gradient, `dgrad(weight[ids], *operands)`."""
    g = torch.Generator().manual_seed(5)
    shard = torch.randn(EXPERTS, weight[0] // WORLD, weight[1], generator=g)
    ids = torch.randint(0, EXPERTS, operands[0].shape[:1], generator=g)

    def step(shard, ids, *operands):
        return [dgrad(aten.index.Tensor(materialize(shard), [ids]), *operands)]

    graph = hand_written(step, shard, ids, *operands)
    for node in graph.module.graph.nodes:
        if node.target in (aten.bmm.default, aten.exp.default):
            node.meta["partitioner_tag"] = "is_backward"
    return graph


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6)).to(BF16)


# Rewrites.


def test_the_rewrite():
    graph = dgrad_graph(
        lambda w, dy: aten.bmm.default(aten.permute.default(w, [0, 2, 1]), dy), (OUT, IN), noise(ROWS, OUT, 1)
    )
    done = graph.run("fuse_dgrads")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (1, 1, [])
    assert not matrices_of_rows(graph.module.graph)
    assert_expected_inline(
        listing(graph.module.graph.nodes),
        """\
materialize: bf16[4, 16, 8] = gtp.materialize([arg0_1], [None], ['0'], [4], 1, 16, 'avg', torch.bfloat16, torch.float32)
permute_default: bf16[24, 1, 16] = aten.permute(arg2_1, [0, 2, 1])
add_tensor: i64[24] = aten.add(arg1_1, 4)
lt_scalar: b8[24] = aten.lt(arg1_1, 0)
where_self: i64[24] = aten.where(lt_scalar, add_tensor, arg1_1)
sort_stable = aten.sort(where_self, stable=True)
iota_default: i64[4] = prims.iota(4, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
getitem: i64[24] = sort_stable[0]
searchsorted_tensor: i32[4] = aten.searchsorted(getitem, iota_default, out_int32=True, right=True)
getitem_1: i64[24] = sort_stable[1]
permute_default_1: bf16[4, 8, 16] = aten.permute(materialize, [0, 2, 1])
index_tensor: bf16[24, 1, 16] = aten.index(permute_default, [getitem_1])
reshape_default: bf16[24, 16] = aten.reshape(index_tensor, [-1, 16])
grouped_linear_default: bf16[24, 8] = gtp.grouped_linear(reshape_default, permute_default_1, searchsorted_tensor)
view_default: bf16[24, 1, 8] = aten.view(grouped_linear_default, [24, 1, 8])
index_put_default: bf16[24, 1, 8] = aten.index_put(view_default, [getitem_1], view_default)
permute_default_2: bf16[24, 8, 1] = aten.permute(index_put_default, [0, 2, 1])""",
    )


@pytest.mark.parametrize("name", MODELS)
def test_backward_reads_no_matrix_of_a_row(name):
    forward, backward, count = partitioned(name)
    assert len(matrices_of_rows(forward.graph)) == 2  # weight[ids], as the model wrote it
    assert not matrices_of_rows(backward.graph)
    assert not set(matrices_of_rows(forward.graph)) & set(forward.graph.output_node().args[0][count:])
    assert len(nodes(backward.graph, gtp.grouped_wgrad_parts.default)) == 2
    assert len(nodes(backward.graph, aten.sort.stable)) == 1  # for all of them


@pytest.mark.parametrize("name", MODELS)
def test_without_it_forward_keeps_them(name):
    """The test above means something."""
    forward, backward, count = partitioned(name, without=("fuse_dgrads",))
    assert matrices_of_rows(backward.graph)
    assert set(matrices_of_rows(forward.graph)) & set(forward.graph.output_node().args[0][count:])


# Refuses.


def test_the_users_own_forward_stays():
    graph = behind("picked", *BEFORE)
    before = graph.text()
    done = graph.run("fuse_dgrads")
    assert (done.report.matched, done.report.changed) == (0, 0)
    assert graph.text() == before


@pytest.mark.parametrize(
    "dgrad",
    [
        lambda w, dy: aten.exp.default(w),
        lambda w, dy: aten.bmm.default(aten.view.default(w, [ROWS * 2, OUT // 2, IN]), dy.new_ones(ROWS * 2, IN, 1)),
    ],
    ids=["another_operator", "matrices_cut"],
)
def test_another_reader_is_named(dgrad):
    graph = dgrad_graph(dgrad, (OUT, IN), noise(ROWS, OUT, 1))
    before = graph.text()
    done = graph.run("fuse_dgrads")
    assert done.report.changed == 0
    assert {s.reason.partition(": ")[2] for s in done.report.skipped} == {
        "reads a weight for each row, which forward keeps until backward"
    }
    assert graph.text() == before


# Preserves.


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("picks", [1, ROWS])  # ranks differ in it, and have to gather equally often
@pytest.mark.parametrize(
    ("dgrad", "weight"),
    [
        (lambda w, dy: aten.bmm.default(aten.permute.default(w, [0, 2, 1]), dy.mT), (OUT, IN)),
        (lambda w, dy: aten.bmm.default(w, dy.mT), (IN * 2, OUT)),
        (lambda w, dy: aten.bmm.default(dy, w), (OUT, IN)),
        (lambda w, dy: aten.bmm.default(dy, aten.transpose.int(w, 1, 2)), (IN * 2, OUT)),
    ],
    ids=["left_transposed", "left", "right", "right_transposed"],
)
def test_the_input_gradient_is_the_same(dgrad, weight, picks, rows):
    graph = dgrad_graph(dgrad, weight, noise(picks, rows, OUT))
    before = graph.copy()
    assert graph.run("fuse_dgrads").report.changed == 1
    assert ops(graph)["aten.bmm.default"] == 0
    # Products summed in float32 in another order, then rounded once to bf16.
    assert compare_numerics(before, graph)[0] <= 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_models_gradients_are_the_same(name):
    before = behind(name, *BEFORE)
    after = before.copy()
    assert after.run("fuse_dgrads").report.changed == 1  # of `down`; nobody asks for the gradient of x
    forward, *gradients = (d for d in compare_numerics(before, after) if d is not None)
    assert forward == 0.0
    assert max(gradients) <= 3e-3


# Idempotent.


@pytest.mark.parametrize("name", MODELS)
def test_a_second_run_changes_nothing(name):
    assert_unchanged_by(behind(name, *BEFORE, "fuse_dgrads"), "fuse_dgrads")
