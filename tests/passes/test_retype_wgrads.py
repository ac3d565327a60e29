"""retype_wgrads: a gradient leaves its GEMM in main_grad's dtype, and stays in it up to the anchor."""

import pytest
import torch
from tiny_models import (
    BF16,
    IN,
    OUT,
    ROWS,
    WORLD,
    anchor_errors,
    assert_unchanged_by,
    behind,
    capture,
    finalize,
    hand_written,
    joint,
    nodes,
    ops,
    relative_error,
    run,
    shard_like,
    wgrad_graph,
)
from wgrad_forms import FORMS, GEMM_FORMS, Form, bmm, form_id, mm, operands, put

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.wgrad_patterns import find_chain
from gtp_compile.testing import JointGraph, compare_numerics

aten = torch.ops.aten
gtp = torch.ops.gtp
prims = torch.ops.prims

GEMM_MODELS = (
    "dense", "twice", "thrice", "read_once", "parts", "experts", "experts_transposed", "grouped_stacked", "one_by_one",
    "leader_only", "leader_only_torch", "leader_only_transposed", "frozen_member", "batched", "broadcast",
    "picked", "batched_experts", "batched_experts_transposed",
)  # fmt: skip
OTHER_MODELS = (
    "dense_bias", "grouped", "embedding", "layer_norm", "rms_norm", "expert_bias_index", "expert_bias_select", "tied",
    "blocks", "checkpointed",
)  # fmt: skip


def chain_dtypes(graph: JointGraph) -> set[torch.dtype]:
    """The dtypes on the way of every gradient, from what computes it to its anchor."""
    chains = [find_chain(a.grad, a.grad_dtype) for a in Finalize.find(graph.module.graph)]
    return {n.meta["val"].dtype for chain in chains for n in chain.nodes}


def _zeros(*shape: int) -> torch.Tensor:
    return aten.full.default(list(shape), 0.0, dtype=BF16)


def local(full: torch.Tensor) -> torch.Tensor:
    """Rank 0's part along dim 0."""
    return full.narrow(0, 0, full.shape[0] // WORLD)


# Rewrites.


def test_a_dense_gemm_writes_float32():
    graph = joint("dense")
    done = graph.run("retype_wgrads")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (1, 1, [])
    assert done.ops == {"aten.mm.default": -1, "aten.permute.default": -1, "gtp.dense_wgrad.default": 1}
    (gemm,) = nodes(graph, gtp.dense_wgrad.default)
    assert [a.meta["val"].dtype for a in gemm.args[:2]] == [BF16, BF16]
    assert gemm.args[2] is gemm.meta["val"].dtype is torch.float32
    assert list(gemm.users) == nodes(graph, gtp.finalize.default)


@pytest.mark.parametrize("name", ["experts", "experts_transposed"])
def test_a_grouped_gemm_of_either_layout_becomes_ours(name):
    graph = joint(name)
    assert ops(graph)["aten._grouped_mm.default"] == 2  # forward, wgrad
    done = graph.run("retype_wgrads")
    assert done.ops["aten._grouped_mm.default"] == -1
    assert done.ops["gtp.grouped_wgrad.default"] == 1
    assert chain_dtypes(graph) == {torch.float32}


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_every_form_is_typed_from_its_gemm_to_its_anchor(form: Form):
    dy, x, ids, offs = operands()
    graph = wgrad_graph(form.compute, dy, x, ids, offs)
    done = graph.run("retype_wgrads")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (1, 1, [])
    assert chain_dtypes(graph) == {torch.float32}
    counts = ops(graph)
    assert counts["gtp.widen.default"] == 0
    assert counts["gtp.dense_wgrad.default"] + counts["gtp.grouped_wgrad.default"] == form.gemms - form.kept
    (got,) = graph.evaluate()
    assert relative_error(got, local(form.reference(dy, x, ids, offs))) <= 1e-6


@pytest.mark.parametrize("form", GEMM_FORMS, ids=form_id)
def test_without_it_every_gemm_form_is_rounded(form: Form):
    """The bound of the test above means something."""
    dy, x, ids, offs = operands()
    (got,) = wgrad_graph(form.compute, dy, x, ids, offs).evaluate()
    assert relative_error(got, local(form.reference(dy, x, ids, offs))) > 1e-3


def test_the_sum_of_two_uses_follows():
    """A weight that is read once and used twice: AOTAutograd accumulates before the anchor (`is_gradient_acc`)."""
    graph = joint("read_once")
    (add,) = nodes(graph, aten.add.Tensor)
    assert add.meta["val"].dtype == BF16
    done = graph.run("retype_wgrads")
    assert done.ops["gtp.dense_wgrad.default"] == 2
    (add,) = nodes(graph, aten.add.Tensor)
    assert add.meta["val"].dtype == torch.float32


@pytest.mark.parametrize("name", ["leader_only", "leader_only_torch", "leader_only_transposed"])
def test_plain_followers_get_a_cast_of_the_one_gemm(name):
    graph = joint(name)
    done = graph.run("retype_wgrads")
    (gemm,) = nodes(graph, gtp.grouped_wgrad.default)
    assert ops(graph)["aten._grouped_mm.default"] <= 1  # forward's
    assert done.ops["prims.convert_element_type.default"] == 1
    (narrow,) = (u for u in gemm.users if u.target is prims.convert_element_type.default)
    assert narrow.args[1] is BF16


def test_followers_behind_a_common_view_share_the_gemm():
    """The view between the GEMM and the members has a user outside the leader's chain."""
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT // 2, IN))

    def step(shard, dy, x):
        stacked = aten.view.default(mm(dy, x), [2, OUT // 2, IN])
        return [finalize(aten.select.int(stacked, 0, 0), shard), aten.select.int(stacked, 0, 1)]

    graph = hand_written(step, shard, dy, x)
    before = graph.copy()
    graph.run("retype_wgrads")
    assert ops(graph)["aten.mm.default"] == 0
    assert ops(graph)["gtp.dense_wgrad.default"] == 1
    assert compare_numerics(before, graph)[1] == 0.0


def test_weights_of_their_own_that_share_a_gemm_retype_it_once():
    """Three placed weights in one stack without a group: three anchors, one GEMM, no rounding on the way to any."""
    graph = joint("one_by_one")
    assert len(Finalize.find(graph.module.graph)) == 3
    graph.run("retype_wgrads")
    assert ops(graph)["gtp.grouped_wgrad.default"] == 1
    assert chain_dtypes(graph) == {torch.float32}
    assert max(anchor_errors(graph)) <= 1e-6


# Refuses.


@pytest.mark.parametrize(
    ("compute", "node", "reason"),
    [
        (
            lambda dy, x: aten.addmm.default(aten.new_zeros.default(dy, [OUT, IN]), dy.t(), x),
            "addmm",
            "no pass knows a weight gradient through aten.addmm.default",
        ),
        (
            lambda dy, x: aten.mul.Tensor(mm(dy, x), aten.exp.default(mm(dy, x))),
            "mul",
            "no pass knows a weight gradient through aten.mul.Tensor",
        ),
        (
            lambda dy, x: aten.add.Tensor(mm(dy, x), mm(dy, x), alpha=2),
            "add",
            "no pass knows a weight gradient through aten.add.Tensor",
        ),
        (lambda dy, x: dy, "arg1", "the gradient comes from outside this graph (arg1_1); its GEMM is in another graph"),
        (
            lambda dy, x: aten.permute.default(aten.clone.default(dy), [1, 0]),
            "arg1",
            "the gradient comes from outside this graph",
        ),
    ],
    ids=["addmm", "times_a_tensor", "alpha", "from_outside", "from_outside_through_views"],
)
def test_what_it_does_not_know_is_widened_once(compute, node, reason):
    dy, x, *_ = operands()
    graph = wgrad_graph(compute, dy, x)
    before = graph.copy()
    done = graph.run("retype_wgrads")
    (skip,) = done.report.skipped
    assert skip.node.startswith(node)
    assert reason in skip.reason
    (widen,) = nodes(graph, gtp.widen.default)
    assert widen.args[0].name == skip.node
    assert widen.args[2] is torch.float32
    assert chain_dtypes(graph) <= {torch.float32}
    assert compare_numerics(before, graph) == [0.0]  # as rounded as it was


def test_one_unknown_term_does_not_keep_the_others_rounded():
    dy, x, *_ = operands()

    def two_uses(dy, x):
        return aten.add.Tensor(mm(dy, x), aten.exp.default(mm(dy, x)))

    graph = wgrad_graph(two_uses, dy, x)
    graph.run("retype_wgrads")
    assert ops(graph)["gtp.dense_wgrad.default"] == 1
    assert ops(graph)["gtp.widen.default"] == 1


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda dy, x, ids, r: aten.mul.Tensor(bmm(dy, x), r), "mul: no pass knows"),
        (lambda dy, x, ids, r: aten.sum.dim_IntList(aten.mul.Tensor(bmm(dy, x), r), [0]), "mul: no pass knows"),
        (lambda dy, x, ids, r: put(ids, aten.mul.Tensor(bmm(dy, x), r)), "mul: no pass knows"),
        (lambda dy, x, ids, r: aten.baddbmm.default(r.expand(ROWS, OUT, IN), dy.mT, x), "baddbmm: no pass knows"),
    ],
    ids=["bmm", "batch_sum", "picked", "bmm_with_a_base"],
)
def test_no_operand_is_ignored(compute, reason):
    """A number for each matrix (a scale, a routing weight), or something to add: refused, with the operator's name."""
    dy, x, ids, _ = operands()
    r = torch.randn(ROWS, 1, 1, generator=torch.Generator().manual_seed(3)).to(BF16)
    graph = wgrad_graph(compute, dy.unsqueeze(1), x.unsqueeze(1), ids, r)
    before = graph.copy()
    (skip,) = graph.run("retype_wgrads").report.skipped
    assert skip.reason.startswith(reason)
    assert ops(graph)["gtp.widen.default"] == 1
    assert compare_numerics(before, graph)[0] <= 5e-3  # sums in float32 from there on


@pytest.mark.parametrize(
    "scattered",
    [
        lambda rows, ids: aten.index_put.default(
            _zeros(32, OUT, IN), [ids + 3 * torch.arange(8).repeat_interleave(3)], rows
        ),
        lambda rows, ids: aten.index_put.default(_zeros(OUT, 32, IN), [None, ids], rows.transpose(0, 1), True),
        lambda rows, ids: aten.index_put.default(_zeros(32, OUT, IN) + 1, [ids], rows, True),
        lambda rows, ids: aten.index_put.default(_zeros(ROWS, OUT, IN), [ids < 2], rows[:19], True),
        lambda rows, ids: aten.index_add.default(_zeros(32, OUT, IN), 0, ids, rows, alpha=2),
        lambda rows, ids: aten.index_add.default(_zeros(OUT, 32, IN), 1, ids, rows.transpose(0, 1)),
    ],
    ids=["not_accumulated", "second_dim", "base_is_not_zero", "mask", "alpha", "index_add_second_dim"],
)
def test_another_scatter_is_no_sort(scattered):
    """What is scattered is followed on its own, and the scatter keeps its operands."""
    dy, x, ids, _ = operands()
    graph = wgrad_graph(lambda dy, x, ids: scattered(bmm(dy, x), ids), dy.unsqueeze(1), x.unsqueeze(1), ids % 3)
    before = graph.copy()
    graph.run("retype_wgrads")
    counts = ops(graph)
    assert counts["gtp.grouped_wgrad.default"] == counts["aten.sort.stable"] == 0
    assert counts["aten.index_put.default"] + counts["aten.index_add.default"] == 1
    assert compare_numerics(before, graph)[0] <= 5e-3


def test_a_scaled_weight_of_a_model_is_named():
    graph = joint("scaled")
    (skip,) = graph.run("retype_wgrads").report.skipped
    assert skip.node.startswith("mul")
    assert "aten.mul.Tensor" in skip.reason
    assert ops(graph)["gtp.widen.default"] == 1


def test_the_grouped_gemm_of_an_activation_is_no_weight_gradient():
    dy, *_ = operands()
    weight = torch.randn(4, OUT, IN).to(BF16)
    offs = torch.tensor([7, 7, 19, ROWS], dtype=torch.int32)
    graph = wgrad_graph(lambda dy, weight, offs: aten._grouped_mm.default(dy, weight, offs), dy, weight, offs)
    (skip,) = graph.run("retype_wgrads").report.skipped
    assert "is no weight gradient (ragged rows are not contracted)" in skip.reason


def test_compute_dtype_is_kept_where_there_is_no_main_grad():
    """The rule asks for bf16 then; nothing is widened, and a sum that runs in float32 is not narrowed."""
    for name in ("dense", "experts", "rms_norm"):
        graph = capture(name, main_grad_dtype=None)
        before = graph.text()
        done = graph.run("retype_wgrads")
        assert (done.report.matched, done.report.changed, done.ops) == (1, 0, {})
        assert graph.text() == before


def test_what_is_wider_than_the_rule_is_cast_only_behind_its_sum():
    dy, x, *_ = operands()
    graph = hand_written(
        lambda shard, dy, x: [
            gtp.finalize.default(
                aten.sum.dim_IntList(aten.mul.Tensor(dy, 1.0), [0], dtype=torch.float32),
                [shard], [None], ["0"], [WORLD], 0, OUT, "avg", BF16,
            )[0]
        ],
        torch.zeros(OUT // WORLD, dtype=BF16), dy, x,
    )  # fmt: skip
    done = graph.run("retype_wgrads")
    assert done.ops == {"prims.convert_element_type.default": 1}
    (total,) = nodes(graph, aten.sum.dim_IntList)
    assert total.meta["val"].dtype == torch.float32


# Preserves.


@pytest.mark.parametrize("name", GEMM_MODELS)
def test_the_error_of_every_gemm_group_shrinks(name):
    before = behind(name, "group_wgrads")
    after = run(before.copy(), "retype_wgrads")
    rounded = [e for e in anchor_errors(before) if e]  # an expert without rows loses nothing
    assert rounded
    assert min(rounded) > 1e-3
    assert max(anchor_errors(after)) <= 1e-6
    forward = compare_numerics(before, after)[: before.num_fwd_outputs]
    assert forward == [0.0] * len(forward)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_reductions_are_summed_in_float32(name):
    graph = behind(name, "group_wgrads", "retype_wgrads")
    assert chain_dtypes(graph) == {torch.float32}
    assert max(anchor_errors(graph)) <= 1e-6


@pytest.mark.parametrize("passes", [("group_wgrads", "retype_wgrads"), ("group_wgrads", "fuse_wgrads")], ids=" ".join)
def test_a_weight_for_each_row_costs_one_grouped_gemm(passes):
    """Whether the dtype has to change or not: no matrix for each row."""
    graph = run(joint("picked"), *passes)
    ids, x = (p for p in graph.primals if p.shape[0] == ROWS)
    dy = torch.randn(ROWS, OUT, generator=torch.Generator().manual_seed(0)).to(BF16)
    exact = torch.zeros(4, OUT, IN, dtype=torch.float64)
    exact.index_add_(0, ids, dy.double().unsqueeze(2) * x.double().unsqueeze(1))
    (got,) = (t for t in graph.evaluate()[1:] if t is not None)
    assert relative_error(got, exact[:, : OUT // WORLD]) <= (1e-6 if "retype_wgrads" in passes else 3e-3)
    assert ops(graph)["gtp.grouped_wgrad.default"] == 1
    assert ops(graph)["aten.index_put.default"] == 0


def test_plain_weights_keep_their_gradients():
    before = joint("leader_only")
    after = run(before.copy(), "retype_wgrads")
    *_, first, second, _ = compare_numerics(before, after)  # the last input is x
    assert (first, second) == (0.0, 0.0)


# Idempotent.


@pytest.mark.parametrize("name", [*GEMM_MODELS, *OTHER_MODELS, "scaled"])
def test_a_second_run_changes_nothing(name):
    graph = behind(name, "group_wgrads", "retype_wgrads")
    assert_unchanged_by(graph, "retype_wgrads")


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_a_second_run_changes_no_form(form: Form):
    graph = run(wgrad_graph(form.compute, *operands()), "retype_wgrads")
    again = graph.copy().run("retype_wgrads")
    assert (again.report.changed, again.ops) == (0, {})
