"""insert_collectives: anchors become collectives, one gather a materialization and one reduction a group."""

import pytest
import torch
from expecttest import assert_expected_inline
from tiny_models import (
    IN,
    MODELS,
    OUT,
    WORLD,
    assert_unchanged_by,
    behind,
    capture,
    finalize,
    hand_written,
    joint,
    listing,
    nodes,
    ops,
    run,
    shard_like,
)
from torch.distributed.tensor import Shard
from wgrad_forms import mm, operands

from gtp_compile.passes.base import NOTE
from gtp_compile.passes.insert_collectives import AccumulateNote, GatherNote, ReduceNote
from gtp_compile.testing import compare_numerics

aten = torch.ops.aten
gtp = torch.ops.gtp
c10d = torch.ops._c10d_functional
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads")
GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
SUM = "_c10d_functional.all_reduce.default"


def lowered(name: str, **kwargs):
    graph = capture(name, **kwargs) if kwargs else joint(name)
    return run(graph, *BEFORE, "insert_collectives")


def accumulated(graph) -> list[torch.fx.Node]:
    return [n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), AccumulateNote)]


# Rewrites.


def test_a_dense_weight():
    graph = lowered("dense")
    assert_expected_inline(
        listing(graph.module.graph.nodes),
        """\
convert_element_type_default: bf16[4, 8] = prims.convert_element_type(primals_2, torch.bfloat16)
all_gather_into_tensor_default: bf16[16, 8] = _c10d_functional.all_gather_into_tensor(convert_element_type_default, 4, '0')
wait_tensor_default: bf16[16, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
permute: bf16[8, 16] = aten.permute(wait_tensor_default, [1, 0])
mm: bf16[24, 16] = aten.mm(primals_1, permute)
dense_wgrad_default: f32[16, 8] = gtp.dense_wgrad(tangents_1, primals_1, torch.float32)
reduce_scatter_tensor_default: f32[4, 8] = _c10d_functional.reduce_scatter_tensor(dense_wgrad_default, 'avg', 4, '0')
wait_tensor_default_1: f32[4, 8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
add_tensor: f32[4, 8] = aten.add(primals_3, wait_tensor_default_1)""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "sums"),
    [
        ("dense", 1, 1, 0),
        ("dense_bias", 1, 1, 1),
        ("twice", 1, 1, 0),
        ("thrice", 1, 1, 0),
        ("experts", 1, 1, 0),
        ("grouped", 1, 1, 1),  # three weights one gather, one reduce-scatter; three biases one all-reduce
        ("grouped_stacked", 1, 1, 0),
        ("leader_only", 1, 1, 0),
        ("one_by_one", 3, 3, 0),
        ("layer_norm", 0, 0, 2),
        ("tied", 1, 1, 0),
        ("blocks", 6, 6, 6),
        ("batched", 1, 1, 0),
        ("picked", 1, 1, 0),
    ],
)
def test_each_group_costs_one_collective_each_way(name, gathers, scatters, sums):
    counts = ops(lowered(name))
    assert (counts[GATHER], counts[SCATTER], counts[SUM]) == (gathers, scatters, sums)
    assert counts["_c10d_functional.wait_tensor.default"] == gathers + scatters + sums


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_anchor_is_left(name):
    counts = ops(lowered(name))
    assert counts["gtp.materialize.default"] == counts["gtp.finalize.default"] == 0


def test_what_travels_has_the_rules_dtype():
    graph = lowered("grouped")
    assert {n.meta["val"].dtype for n in nodes(graph, c10d.reduce_scatter_tensor.default)} == {torch.float32}
    assert {n.meta["val"].dtype for n in nodes(graph, c10d.all_reduce.default)} == {torch.float32}
    assert {n.meta["val"].dtype for n in nodes(graph, c10d.all_gather_into_tensor.default)} == {torch.bfloat16}


def test_sums_and_gathers_are_noted():
    graph = lowered("dense_bias")
    reductions = [n.meta[NOTE].inputs for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), ReduceNote)]
    assert reductions == [(3,), (1,)]
    assert len(accumulated(graph)) == 2
    main_grads = [n.args[0] for n in accumulated(graph)]
    assert all(m.op == "placeholder" and m.meta["saved_tensor_with_no_vc_check"] for m in main_grads)
    gathers = [n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), GatherNote)]
    assert {n.target for n in gathers} >= {c10d.all_gather_into_tensor.default, c10d.wait_tensor.default}


@pytest.mark.parametrize("reduce_op", ["avg", "sum"])
def test_the_operation_of_the_sum_is_the_users(reduce_op):
    (scatter,) = nodes(lowered("dense", reduce_op=reduce_op), c10d.reduce_scatter_tensor.default)
    assert scatter.args[1:] == (reduce_op, WORLD, "0")


def test_one_rank_communicates_nothing():
    counts = ops(lowered("grouped", world=1))
    assert counts[GATHER] == counts[SCATTER] == counts[SUM] == 0


def test_without_main_grad_the_sum_is_returned_in_the_leafs_dtype():
    graph = lowered("dense", main_grad_dtype=None)
    assert not accumulated(graph)
    gradients = [n for n in graph.module.graph.output_node().args[0][graph.num_fwd_outputs :] if n is not None]
    assert [n.meta["val"].dtype for n in gradients] == [torch.float32]
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    assert scatter.meta["val"].dtype == torch.bfloat16  # compute dtype: the rule without main_grad


def test_a_frozen_member_is_neither_computed_with_nor_sent_for():
    graph = lowered("frozen_member")
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    assert list(scatter.meta["val"].shape) == [2, OUT // WORLD, IN]  # two of three members
    assert len(accumulated(graph)) == 2


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_of_a_stack(dim):
    graph = lowered("experts", shard_fn=lambda fqn, module, param: Shard(dim))
    local = [4, OUT, IN]
    local[dim] //= WORLD
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    (wait,) = scatter.users
    (total,) = accumulated(graph)
    assert list(total.meta["val"].shape) == list(wait.meta["val"].shape) == local
    # A functional collective works along dim 0 only: a gathered weight is brought back from there by a copy.
    assert ops(graph)["aten.clone.default"] == (0 if dim == 0 else 1)
    assert ops(graph)["gtp.grouped_wgrad_parts.default"] == (0 if dim == 0 else 1)


@pytest.mark.parametrize("name", ["experts", "experts_transposed", "grouped", "grouped_stacked", "picked"])
def test_a_grouped_gemm_stores_what_travels(name):
    graph = lowered(name)
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    (view, *_) = scatter.args
    (gemm,) = view.all_input_nodes
    assert (view.target, gemm.target) == (aten.view.default, gtp.grouped_wgrad_parts.default)
    assert view.meta["val"].shape[0] == WORLD * gemm.meta["val"].shape[1]
    assert ops(graph)["gtp.grouped_wgrad.default"] == 0


@pytest.mark.parametrize("size", [OUT + 1, WORLD - 1])
def test_the_gemm_pads_what_travels(size):
    """Sizes that do not divide, and fewer rows than ranks."""
    dy, x, _, offs = operands()
    dy = torch.cat([dy, dy], 1)[:, :size].contiguous()
    shard = torch.zeros(offs.numel(), -(-size // WORLD), x.shape[1])

    def reduced(shard, dy, x, offs):
        return [finalize(gtp.grouped_wgrad.default(dy, x, offs, torch.float32), shard, dim=1)]

    graph = hand_written(reduced, shard, dy, x, offs)
    after = run(graph.copy(), "insert_collectives")
    assert ops(after)["aten.constant_pad_nd.default"] == 0
    assert ops(after)["gtp.grouped_wgrad_parts.default"] == 1
    assert compare_numerics(graph, after) == [0.0]


def test_a_gradient_that_is_read_elsewhere_is_packed():
    dy, x, _, offs = operands()
    shard = torch.zeros(offs.numel(), OUT // WORLD, x.shape[1])

    def reduced_and_returned(shard, dy, x, offs):
        grad = gtp.grouped_wgrad.default(dy, x, offs, torch.float32)
        return [finalize(grad, shard, dim=1), grad]

    after = run(hand_written(reduced_and_returned, shard, dy, x, offs), "insert_collectives")
    counts = ops(after)
    assert (counts["gtp.grouped_wgrad.default"], counts["gtp.grouped_wgrad_parts.default"]) == (1, 0)


# Refuses. Nothing is left out: what can't be accumulated is returned.


def test_sums_that_were_not_merged_are_returned_for_the_hook():
    graph = behind("twice", "retype_wgrads", "insert_collectives")
    assert ops(graph)[SCATTER] == 2
    assert not accumulated(graph)


def test_a_dead_materialization_leaves_no_gather():
    graph = joint("dense")
    (weight,) = nodes(graph, gtp.materialize.default)
    with graph.module.graph.inserting_after(weight):
        dead = graph.module.graph.node_copy(weight)
    assert dead.meta["val"].shape == (OUT, IN)
    assert ops(run(graph, "insert_collectives"))[GATHER] == 1


def test_a_gradient_that_nobody_takes_is_not_reduced():
    dy, x, *_ = operands()
    shard = shard_like(torch.empty(OUT, IN))

    def dead(shard, dy, x):
        finalize(mm(dy, x), shard)
        return [dy]

    assert ops(run(hand_written(dead, shard, dy, x), "insert_collectives"))[SCATTER] == 0


# Preserves.


@pytest.mark.parametrize("name", [n for n in sorted(MODELS) if not n.startswith("leader_only")])
def test_numbers_stay(name):
    """Each anchor, run eagerly, does what the pass inserts for it. (Main_grads are zero at first.)"""
    before = behind(name, *BEFORE)
    after = run(before.copy(), "insert_collectives")
    assert {d for d in compare_numerics(before, after) if d is not None} == {0.0}


def test_what_was_in_main_grad_is_added_to():
    before = behind("dense", *BEFORE)
    after = run(before.copy(), "insert_collectives")
    (total,) = accumulated(after)
    position = after.module.graph.find_nodes(op="placeholder").index(total.args[0])
    primals = list(after.primals)
    primals[position] = torch.full_like(primals[position], 3.0)
    after.primals = tuple(primals)
    (want,), (got,) = ([t for t in g.evaluate()[1:] if t is not None] for g in (before, after))
    assert torch.equal(got, want + 3.0)


# Idempotent.


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_second_run_changes_nothing(name):
    assert_unchanged_by(lowered(name), "insert_collectives")
