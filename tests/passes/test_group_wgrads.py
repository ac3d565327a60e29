"""group_wgrads: one gradient anchor a weight group, whatever the number of its uses."""

import pytest
import torch
from tiny_models import (
    BF16,
    IN,
    MODELS,
    OUT,
    ROWS,
    WORLD,
    Dense,
    anchor_errors,
    assert_unchanged_by,
    behind,
    finalize,
    hand_written,
    joint,
    listing,
    nodes,
    ops,
    run,
    shard_all,
    shard_like,
)
from wgrad_forms import mm, operands

import gtp_compile
from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.describe import describe_groups
from gtp_compile.testing import capture_joint, compare_numerics, fake_mesh

aten = torch.ops.aten
gtp = torch.ops.gtp


def inputs(graph) -> list[tuple[int, ...]]:
    """For each weight group, the positions of its shards among the graph's inputs."""
    return [g.inputs for g in describe_groups(graph.module.graph)]


# Rewrites.


@pytest.mark.parametrize(("name", "uses"), [("twice", 2), ("thrice", 3)])
def test_the_uses_of_a_weight_share_one_gather_and_one_anchor(name, uses):
    graph = joint(name)
    counts = ops(graph)
    assert (counts["gtp.materialize.default"], counts["gtp.finalize.default"]) == (uses, uses)
    done = graph.run("group_wgrads")
    assert (done.report.matched, done.report.changed) == (1, uses)  # uses - 1 gathers, 1 group
    counts = ops(graph)
    assert (counts["gtp.materialize.default"], counts["gtp.finalize.default"]) == (1, 1)
    # The sums are as many as before, but stand before the anchor.
    (anchor,) = Finalize.find(graph.module.graph)
    assert anchor.grad.target is aten.add.Tensor
    assert counts["aten.add.Tensor"] == uses - 1


def test_a_tied_embedding_and_output_layer_are_one_weight():
    graph = joint("tied")
    assert ops(graph)["gtp.finalize.default"] == 2
    graph.run("group_wgrads")
    (anchor,) = Finalize.find(graph.module.graph)
    assert {n.target for n in anchor.grad.all_input_nodes} >= {aten.mm.default}


def test_hand_written_graph():
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT, IN))

    def two_uses(shard, dy, x):
        return [aten.add.Tensor(finalize(mm(dy, x), shard), finalize(mm(dy, aten.neg.default(x)), shard))]

    graph = hand_written(two_uses, shard, dy, x)
    graph.run("group_wgrads")
    assert listing(graph.module.graph.nodes).splitlines() == [
        "permute: bf16[16, 24] = aten.permute(dy_1, [1, 0])",
        "mm: bf16[16, 8] = aten.mm(permute, x_1)",
        "permute_1: bf16[16, 24] = aten.permute(dy_1, [1, 0])",
        "neg: bf16[24, 8] = aten.neg(x_1)",
        "mm_1: bf16[16, 8] = aten.mm(permute_1, neg)",
        "add_tensor: bf16[16, 8] = aten.add(mm, mm_1)",
        "finalize = gtp.finalize(add_tensor, [shard_1], [None], ['0'], [4], 0, 16, 'avg', torch.float32)",
        "getitem: f32[4, 8] = finalize[0]",
    ]


@pytest.mark.parametrize("nested", ["left", "right"])
def test_three_uses_in_any_nesting_of_their_sum(nested):
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT, IN))

    def three_uses(shard, dy, x):
        a, b, c = (finalize(aten.mul.Tensor(mm(dy, x), k), shard) for k in (1, 2, 4))
        pair = aten.add.Tensor(a, b) if nested == "left" else aten.add.Tensor(b, c)
        return [aten.add.Tensor(pair, c) if nested == "left" else aten.add.Tensor(a, pair)]

    graph = hand_written(three_uses, shard, dy, x)
    before = graph.copy()
    graph.run("group_wgrads")
    assert ops(graph)["gtp.finalize.default"] == 1
    assert compare_numerics(before, graph)[0] < 1e-2


def test_anchors_keep_the_order_of_backward():
    graph = joint("dense_bias")
    graph.run("group_wgrads")
    assert inputs(graph) == [(3,), (1,)]  # backward meets the bias first; inputs: x, weight, mg, bias, mg


def test_the_members_of_a_group_stand_leader_first():
    graph = joint("grouped")
    graph.run("group_wgrads")
    assert [len(members) for members in inputs(graph)] == [3, 3]  # biases, weights
    assert all(members == tuple(sorted(members)) for members in inputs(graph))


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"twice", "thrice", "tied"}))
def test_a_model_whose_weights_are_used_once_keeps_its_operators(name):
    graph = joint(name)
    done = graph.run("group_wgrads")
    assert (done.report.changed, done.ops) == (0, {})
    assert done.report.matched == ops(graph)["gtp.finalize.default"]


# Refuses.


def test_results_that_are_not_summed_stay_apart():
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT, IN))
    graph = hand_written(lambda shard, dy, x: [finalize(mm(dy, x), shard), finalize(mm(dy, x), shard)], shard, dy, x)
    done = graph.run("group_wgrads")
    (skip,) = done.report.skipped
    assert skip.reason == "finalize_1: is used other than in the sum of its weight's gradients"
    assert done.ops == {}
    assert ops(graph)["gtp.finalize.default"] == 2
    reason = "its gradient is reduced 2 times, since the results go elsewhere before they are summed"
    assert [(g.matched, g.reason) for g in describe_groups(graph.module.graph)] == [(False, reason)] * 2


def test_uses_in_different_dtypes_stay_apart():
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT, IN))

    def two_uses(shard, dy, x):
        return [aten.add.Tensor(finalize(mm(dy, x), shard), finalize(mm(dy.float(), x.float()), shard))]

    done = hand_written(two_uses, shard, dy, x).run("group_wgrads")
    (skip,) = done.report.skipped
    assert skip.reason == "finalize: the uses of its weight compute in different dtypes"
    assert done.ops == {}


def test_another_layout_of_the_same_shard_is_another_group():
    dy, x, *_ = operands()
    shard = torch.zeros(OUT // WORLD, IN)

    def two_layouts(shard, dy, x):
        layout = (["0"], [WORLD], -1, 0, "avg")
        whole = gtp.finalize.default(mm(dy, x)[:4], [shard], [None], *layout, torch.float32)[0]
        return [aten.add.Tensor(finalize(mm(dy, x), shard), whole)]

    done = hand_written(two_layouts, shard, dy, x).run("group_wgrads")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (2, 0, [])


def test_an_unmatched_gradient_is_reported_with_its_node_and_operator():
    graph = joint("scaled")
    (skip,) = graph.run("group_wgrads").report.skipped
    (mul,) = (n for n in nodes(graph, aten.mul.Tensor) if n.meta.get("partitioner_tag") == "is_backward")
    assert skip.reason == (
        f"{mul.name}: no pass knows a weight gradient through aten.mul.Tensor "
        "(the weight is scaled by a tensor; scale the activations instead)"
    )


# Preserves.


@pytest.mark.parametrize("name", ["dense", "grouped", "blocks", "one_by_one"])
def test_numbers_stay_where_nothing_is_merged(name):
    before = joint(name)
    differences = compare_numerics(before, run(before.copy(), "group_wgrads"))
    assert {d for d in differences if d is not None} == {0.0}


@pytest.mark.parametrize("name", ["twice", "thrice", "tied"])
def test_the_sum_of_uses_is_right_once_it_is_retyped(name):
    before = joint(name)
    after = run(before.copy(), "group_wgrads")
    forward, *gradients = (d for d in compare_numerics(before, after) if d is not None)
    assert forward == 0.0
    assert max(gradients) < 1e-2  # for the moment the sum is rounded
    assert max(anchor_errors(run(after, "retype_wgrads"))) <= 1e-6


# Idempotent.


@pytest.mark.parametrize("name", ["dense", "twice", "thrice", "tied", "grouped", "scaled"])
def test_a_second_run_changes_nothing(name):
    graph = behind(name, "group_wgrads")
    assert_unchanged_by(graph, "group_wgrads")


def test_uses_of_a_16_bit_shard_are_summed_before_any_of_them_is_rounded():
    """The model itself is bf16: autograd casts each use's gradient to the shard's dtype, then adds."""
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(Dense(IN, uses=2).to(BF16), mesh, shard_fn=shard_all)
        graph = capture_joint(model, torch.ones(ROWS, IN, dtype=BF16))
    assert len(nodes(graph, torch.ops.gtp.finalize.default)) == 2
    graph.run("group_wgrads")
    assert len(nodes(graph, torch.ops.gtp.finalize.default)) == 1
