"""fuse_gathers: grouped GEMMs read the parts as they arrive; the copy that joins them goes."""

import sys

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
    Experts,
    assert_unchanged_by,
    behind,
    ends_of,
    hand_written,
    listing,
    nodes,
    ops,
    partitioned,
)
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import gtp_compile
from gtp_compile.kernels.grouped_linear import choice
from gtp_compile.passes import fuse_gathers as fuse_gathers_pass
from gtp_compile.passes.base import PassContext
from gtp_compile.passes.collective_ops import Layout
from gtp_compile.testing import JointGraph, capture_joint, compare_numerics, fake_mesh

aten = torch.ops.aten
gtp = torch.ops.gtp
FUSED = "gtp.grouped_linear_parts.default"
COPY = "aten.clone.default"
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads", "fuse_dgrads", "insert_collectives")
OFFS = ends_of(7, 0, 12, 5)


def gathered(
    use, shape: tuple[int, ...], dim: int, size: int, *operands: Tensor, members: int = 1, device: str = "cpu"
) -> JointGraph:
    """`use(weight, *operands)` of a gathered weight of `shape`, whose `dim` has `size` rows; collectives inserted."""
    layout = Layout(("0",), (WORLD,), dim, size, "avg")
    local = list(shape)
    local[dim] = layout.chunk
    shards = [torch.randn(local, generator=torch.Generator().manual_seed(i)).to(device) for i in range(members)]
    nothing: list[Tensor | None] = [None] * members

    def step(*inputs):
        rule = (["0"], [WORLD], dim, size, "avg", BF16, torch.float32)
        weight = gtp.materialize.default(list(inputs[:members]), nothing, *rule)
        return [use(weight, *inputs[members:])]

    graph = hand_written(step, *shards, *operands)
    graph.run("insert_collectives")
    return graph


def rows(width: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(9)).to(BF16)


def torchs(weight: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return aten._grouped_mm.default(x, aten.transpose.int(weight, 1, 2), offs)


# Rewrites.


def test_the_rewrite():
    graph = gathered(torchs, (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS)
    done = graph.run("fuse_gathers")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (1, 1, [])
    assert_expected_inline(
        listing(graph.module.graph.nodes),
        """\
convert_element_type_default: bf16[4, 4, 8] = prims.convert_element_type(arg0_1, torch.bfloat16)
all_gather_into_tensor_default: bf16[16, 4, 8] = _c10d_functional.all_gather_into_tensor(convert_element_type_default, 4, '0')
wait_tensor_default: bf16[16, 4, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
view_default: bf16[4, 4, 4, 8] = aten.view(wait_tensor_default, [4, 4, 4, 8])
grouped_linear_parts_default: bf16[24, 16] = gtp.grouped_linear_parts(arg1_1, view_default, arg2_1, 1, 16)""",  # noqa: E501
    )


@pytest.mark.parametrize("op", ["torch", "ours"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_any_layout(op, is_transposed, dim):
    """`[E, N, K]` and `[E, K, N]`, cut along either; the numbers stay."""
    shape = (EXPERTS, IN, OUT) if is_transposed else (EXPERTS, OUT, IN)

    def use(weight, x, offs):
        by_rows = aten.permute.default(weight, [0, 2, 1]) if is_transposed else weight  # [E, N, K]
        return gtp.grouped_linear.default(x, by_rows, offs) if op == "ours" else torchs(by_rows, x, offs)

    before = gathered(use, shape, dim, shape[dim], rows(IN), OFFS)
    after = before.copy()
    assert after.run("fuse_gathers").report.changed == 1
    assert (ops(after)[FUSED], ops(after)[COPY]) == (1, 0)
    assert compare_numerics(before, after) == [0.0]


@pytest.mark.parametrize("size", [OUT - 1, WORLD - 1])
@pytest.mark.parametrize("dim", [1, 2])
def test_padded_parts(dim, size):
    """Sizes that do not divide, and fewer rows than ranks: the padding is never multiplied."""
    shape = [EXPERTS, OUT, IN]
    shape[dim] = size
    before = gathered(
        lambda w, x, offs: gtp.grouped_linear.default(x, w, offs), tuple(shape), dim, size, rows(shape[2]), OFFS
    )
    after = before.copy()
    assert after.run("fuse_gathers").report.changed == 1
    (fused,) = nodes(after, gtp.grouped_linear_parts.default)
    assert fused.args[3:] == (dim, size)
    assert (ops(after)[FUSED], ops(after)[COPY]) == (1, 0)
    assert compare_numerics(before, after) == [0.0]


def test_discrete_weights_that_are_gathered_together():
    before = gathered(
        lambda w, x, offs: gtp.grouped_linear.default(x, w, offs), (OUT, IN), 0, OUT, rows(IN), OFFS, members=EXPERTS
    )
    after = before.copy()
    assert after.run("fuse_gathers").report.changed == 1
    assert (ops(after)[FUSED], ops(after)[COPY]) == (1, 0)
    assert compare_numerics(before, after) == [0.0]


@pytest.mark.parametrize("name", ["experts", "experts_transposed", "grouped", "grouped_stacked", "leader_only"])
def test_models_forward(name):
    graph = behind(name, *BEFORE)
    before = ops(graph)
    report = graph.run("fuse_gathers").report
    if name == "leader_only":  # its followers are whole
        assert report.changed == 0
        return
    assert report.changed == report.matched == 1
    assert before[COPY] - ops(graph)[COPY] == 1


class TwoLayers(torch.nn.Module):
    """Experts of two layers, the first perhaps checkpointed: the second's input gradient multiplies, too."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = Experts(), Experts(is_transposed=True)
        self.down.proj = torch.nn.Parameter(torch.randn(EXPERTS, OUT, IN) * 0.3)
        self.checkpointed = checkpointed

    def both(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x, offs)), offs)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return checkpoint(self.both, x, offs, use_reentrant=False) if self.checkpointed else self.both(x, offs)


def captured(model: torch.nn.Module, *args: Tensor) -> JointGraph:
    with fake_mesh(WORLD) as mesh:
        torch.manual_seed(0)
        gtp_compile.shard(model, mesh, shard_fn=lambda *_: Shard(1), param_dtype=BF16)
        graph = capture_joint(model, *args)
    for name in BEFORE:
        graph.run(name)
    return graph


@pytest.mark.parametrize("checkpointed", [False, True])
def test_forward_and_backward_of_two_layers(checkpointed):
    graph = captured(TwoLayers(checkpointed), rows(IN), OFFS)
    before = graph.copy()
    report = graph.run("fuse_gathers").report
    # up and down; the input gradient of down; nobody asks for that of x.
    assert report.changed == report.matched == 3
    (_, forward, backward) = nodes(graph, gtp.grouped_linear_parts.default)
    assert {forward.args[3], backward.args[3]} == {1, 2}
    assert ops(graph)[COPY] == ops(before)[COPY] - 2
    assert {d for d in compare_numerics(before, graph) if d is not None} == {0.0}


def test_a_checkpoint_keeps_its_tags():
    graph = captured(TwoLayers(checkpointed=True), rows(IN), OFFS)
    tags = [n.meta["recompute"] for n in nodes(graph, aten._grouped_mm.default) if "recompute" in n.meta]
    graph.run("fuse_gathers")
    assert [
        n.meta["recompute"] for n in nodes(graph, gtp.grouped_linear_parts.default) if "recompute" in n.meta
    ] == tags
    assert tags == [CheckpointPolicy.PREFER_RECOMPUTE] * 2


def test_parts_are_not_saved_for_backward():
    forward, backward, count = partitioned("experts")
    saved = [n for n in forward.graph.output_node().args[0][count:] if n is not None]
    assert all(n.op == "placeholder" or n.meta["val"].numel() < EXPERTS * OUT * IN for n in saved)
    assert nodes(forward.graph, gtp.grouped_linear_parts.default)
    assert nodes(backward.graph, gtp.grouped_wgrad_parts.default)


def test_a_forward_without_gradients():
    """`torch.no_grad` has this pass, too."""
    graph = gathered(torchs, (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS)
    fuse_gathers_pass(graph.module, PassContext("inference"))
    assert (ops(graph)[FUSED], ops(graph)[COPY]) == (1, 0)


# Refuses.


def test_a_stack_cut_by_experts_has_no_copy():
    graph = gathered(torchs, (EXPERTS, OUT, IN), 0, EXPERTS, rows(IN), OFFS)
    assert graph.run("fuse_gathers").report.matched == 0
    assert ops(graph)[COPY] == 0


def test_another_use_keeps_the_copy():
    graph = gathered(
        lambda w, x, offs: torchs(w, x, offs) + aten.sum.default(w), (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS
    )
    before = graph.copy()
    assert graph.run("fuse_gathers").report.changed == 1
    assert (ops(graph)[FUSED], ops(graph)[COPY]) == (1, 1)
    assert compare_numerics(before, graph) == [0.0]


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x, offs: aten.bmm.default(
            aten.view.default(x, [EXPERTS, -1, IN]), aten.permute.default(w, [0, 2, 1])
        ),
        lambda w, x, offs: torchs(aten.mul.Tensor(w, 2), x, offs),  # no longer what arrived
        lambda w, x, offs: torchs(aten.view.default(w, [EXPERTS, OUT, IN]).flip(0), x, offs),
    ],
    ids=["bmm", "scaled", "flipped"],
)
def test_what_is_no_grouped_gemm_of_the_stack_stays(use):
    graph = gathered(use, (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS)
    assert graph.run("fuse_gathers").report.matched == 0
    assert ops(graph)[COPY] >= 1


@pytest.mark.parametrize("operand", [{"bias": True}, {"out_dtype": torch.float32}])
def test_an_operand_more_is_not_ignored(operand):
    """A bias, or a result in another dtype; torch knows the arguments, but takes neither yet."""
    graph = gathered(torchs, (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS)
    (gemm,) = nodes(graph, aten._grouped_mm.default)
    gemm.kwargs = {key: gemm.args[0] if value is True else value for key, value in operand.items()}
    assert fuse_gathers_pass(graph.module, PassContext("joint")).matched == 0


def test_a_result_whose_rows_torch_pads():
    """As on CUDA, to 16 bytes; the strides behind it were traced."""
    graph = gathered(torchs, (EXPERTS, OUT - 1, IN), 2, IN, rows(IN), OFFS)
    (gemm,) = nodes(graph, aten._grouped_mm.default)
    gemm.meta["val"] = gemm.meta["val"].new_empty_strided((ROWS, OUT - 1), (OUT, 1))
    report = fuse_gathers_pass(graph.module, PassContext("joint"))
    assert [s.reason for s in report.skipped] == ["torch pads the rows of its result"]
    assert ops(graph)[FUSED] == 0


def test_parts_that_would_cost_more(monkeypatch):
    # The package has the pass under its module's name.
    module = sys.modules["gtp_compile.passes.fuse_gathers"]
    monkeypatch.setattr(module, "why_not_in_parts", lambda *_: "no")
    graph = gathered(torchs, (EXPERTS, OUT, IN), 1, OUT, rows(IN), OFFS)
    before = graph.text()
    report = graph.run("fuse_gathers").report
    assert [s.reason for s in report.skipped] == ["no"]
    assert graph.text() == before


TILES = "are no whole tiles of 64"
KERNEL = "needs Hopper and Triton 3.6"


@pytest.mark.parametrize(
    ("chunk", "dim", "in_features", "dtype", "capability", "gluon", "reason"),
    [
        (128, 1, 256, BF16, (9, 0), True, ""),
        (128, 2, 256, BF16, (9, 0), True, ""),
        (96, 1, 256, BF16, (9, 0), True, TILES),  # a piece would lie in two parts
        (128, 2, 250, BF16, (9, 0), True, TILES),  # padding would be multiplied
        (128, 1, 256, BF16, (9, 0), False, KERNEL),
        (128, 1, 256, BF16, (10, 0), True, KERNEL),  # torch has one there, too
        (96, 1, 256, torch.float16, (9, 0), True, TILES),  # ours for whole weights takes it
        (96, 1, 256, torch.float32, (9, 0), True, ""),  # one plain kernel for all
        (96, 1, 256, BF16, (8, 0), False, ""),
    ],
)
def test_what_parts_cost(monkeypatch, chunk, dim, in_features, dtype, capability, gluon, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choice, "has_gluon", lambda: gluon)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        shape = (2, 4, chunk, in_features) if dim == 1 else (2, 4, 64, chunk)
        x, weight = (torch.empty(s, dtype=dtype, device="cuda") for s in ((ROWS, in_features), shape))
        found = choice.why_not_in_parts(x, weight, dim)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_numbers_stay_on_a_gpu(dim, is_transposed):
    """With parts that are whole tiles, of a size that torch's own kernel takes."""
    out, features = 512, 256

    def use(weight, x, offs):
        return aten._grouped_mm.default(x, weight if is_transposed else aten.transpose.int(weight, 1, 2), offs)

    shape = (EXPERTS, features, out) if is_transposed else (EXPERTS, out, features)
    operands = rows(features).cuda(), OFFS.cuda()
    before = gathered(use, shape, dim, shape[dim], *operands, device="cuda")
    after = before.copy()
    report = after.run("fuse_gathers").report
    assert (report.changed, report.skipped) == (1, [])
    (difference,) = compare_numerics(before, after)
    assert difference <= 5e-3  # both round to bf16


# Idempotent.


@pytest.mark.parametrize("name", ["experts", "grouped", "batched_experts"])
def test_a_second_run_changes_nothing(name):
    assert_unchanged_by(behind(name, *BEFORE, "fuse_gathers"), "fuse_gathers")
