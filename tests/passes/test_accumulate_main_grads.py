"""accumulate_main_grads: in the backward graph, sums are written to main_grad and no gradient is returned."""

import pytest
import torch
from expecttest import assert_expected_inline
from tiny_models import WORLD, assert_unchanged_by, behind, capture, listing, nodes, ops, partitioned, run, split

from gtp_compile.passes.accumulate_main_grads import accumulate_main_grads
from gtp_compile.passes.base import NOTE, PassContext
from gtp_compile.passes.insert_collectives import AccumulateNote
from gtp_compile.pipeline import JOINT_PASSES
from gtp_compile.testing import JointGraph

aten = torch.ops.aten
gtp = torch.ops.gtp
JOINT = [p.__name__ for p in JOINT_PASSES]
WRITES = (aten.copy_.default, gtp.dense_wgrad_add_.default, gtp.grouped_wgrad_add_.default)


def backward_of(name: str, world: int = WORLD) -> JointGraph:
    return JointGraph(partitioned(name, world=world)[1], 0, ())


def results(graph: JointGraph) -> list[torch.fx.Node | None]:
    return list(graph.module.graph.output_node().args[0])


def inputs_of(graph: JointGraph) -> list[torch.Tensor]:
    """Random values for each input of a backward graph, main_grads included."""
    generator = torch.Generator().manual_seed(1)
    fakes = [n.meta["val"] for n in graph.module.graph.find_nodes(op="placeholder")]
    return [
        torch.randn(tuple(f.shape), generator=generator).to(f.dtype)
        if f.is_floating_point()
        else torch.zeros(tuple(f.shape), dtype=f.dtype)
        for f in fakes
    ]


# Rewrites.


def test_a_dense_weight():
    graph = backward_of("dense")
    done = graph.run("accumulate_main_grads")
    assert (done.report.matched, done.report.changed, done.ops) == (1, 1, {"aten.copy_.default": 1})
    assert_expected_inline(
        listing(n for n in graph.module.graph.nodes if n.target in (aten.add.Tensor, aten.copy_.default)),
        """\
add_tensor: f32[4, 8] = aten.add(primals_3, wait_tensor_default_1)
copy__default: f32[4, 8] = aten.copy_(primals_3, add_tensor)""",
    )
    assert results(graph) == [None, None, None]


@pytest.mark.parametrize(("name", "weights"), [("grouped", 6), ("blocks", 12), ("frozen_member", 2), ("thrice", 1)])
def test_every_main_grad_is_written_once(name, weights):
    graph = backward_of(name)
    count = len(results(graph))
    assert graph.run("accumulate_main_grads").report.changed == weights
    written = [n.args[0] for n in nodes(graph, aten.copy_.default)]
    assert len(set(written)) == weights
    assert all(n.op == "placeholder" for n in written)
    assert len(results(graph)) == count  # autograd wants one result an input


@pytest.mark.parametrize("name", ["experts", "experts_transposed", "grouped_stacked", "batched", "dense", "thrice"])
def test_on_one_rank_the_gemm_adds(name):
    graph = backward_of(name, world=1)
    fresh = ops(graph)["gtp.grouped_wgrad.default"], ops(graph)["gtp.dense_wgrad.default"]
    graph.run("accumulate_main_grads")
    # The first uses of a weight are summed before.
    assert ops(graph)["gtp.grouped_wgrad_add_.default"] + ops(graph)["gtp.dense_wgrad_add_.default"] == (
        1 if name != "thrice" else 0
    )
    assert ops(graph)["aten.copy_.default"] == (0 if name != "thrice" else 1)
    if name != "thrice":
        assert sum(fresh) == 1
        assert ops(graph)["gtp.grouped_wgrad.default"] == ops(graph)["gtp.dense_wgrad.default"] == 0
    assert not any(results(graph))


def test_it_adds_where_the_gemm_stood():
    """So that its operands live no longer."""
    graph = backward_of("experts", world=1)
    (gemm,) = nodes(graph, torch.ops.gtp.grouped_wgrad.default)
    place = list(graph.module.graph.nodes).index(gemm)
    graph.run("accumulate_main_grads")
    (adding,) = nodes(graph, torch.ops.gtp.grouped_wgrad_add_.default)
    assert list(graph.module.graph.nodes).index(adding) == place
    assert adding.args[0].op == "placeholder"


# Refuses.


@pytest.mark.parametrize("why", ["gradient", "main_grad", "sum"])
def test_a_gemm_that_something_else_reads_does_not_add(why):
    graph = backward_of("experts", world=1)
    (total,) = (n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), AccumulateNote))
    main_grad, gradient = total.args
    read = {"gradient": gradient, "main_grad": main_grad, "sum": total}[why]
    output = graph.module.graph.output_node()
    with graph.module.graph.inserting_before(output):
        copied = graph.module.graph.call_function(aten.clone.default, (read,))
        copied.meta["val"] = read.meta["val"]
    output.args = ((*output.args[0], copied),)
    graph.run("accumulate_main_grads")
    assert ops(graph)["gtp.grouped_wgrad_add_.default"] == 0
    assert ops(graph)["aten.copy_.default"] == 1


def test_a_sum_that_is_returned_twice_is_added_once():
    graph = backward_of("experts", world=1)
    (total,) = (n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), AccumulateNote))
    output = graph.module.graph.output_node()
    output.args = ((*output.args[0], total),)
    graph.run("accumulate_main_grads")
    assert ops(graph)["gtp.grouped_wgrad_add_.default"] == 0
    assert {n.args for n in nodes(graph, aten.copy_.default)} == {(total.args[0], total)}


def test_a_narrow_main_grad_is_not_added_to_by_a_gemm():
    """The ops sum in float32 only."""
    _, backward, _ = split(run(capture("dense", world=1, main_grad_dtype=torch.bfloat16), *JOINT))
    graph = JointGraph(backward, 0, ())
    graph.run("accumulate_main_grads")
    assert ops(graph)["gtp.dense_wgrad_add_.default"] == 0
    assert ops(graph)["aten.copy_.default"] == 1


def test_gradients_of_plain_weights_are_returned():
    graph = backward_of("leader_only")
    before = [r for r in results(graph) if r is not None]
    graph.run("accumulate_main_grads")
    assert [r for r in results(graph) if r is not None] == before[1:]


def test_without_main_grad_the_gradient_is_returned():
    _, backward, _ = split(run(capture("dense", main_grad_dtype=None), "retype_wgrads", "insert_collectives"))
    graph = JointGraph(backward, 0, ())
    done = graph.run("accumulate_main_grads")
    assert (done.report.matched, done.ops) == (0, {})
    assert sum(r is not None for r in results(graph)) == 1


def test_an_add_of_the_users_is_not_taken_for_ours():
    graph = backward_of("read_once")
    for node in nodes(graph, aten.add.Tensor):
        node.meta.pop(NOTE, None)
    assert graph.run("accumulate_main_grads").report.matched == 0


def test_a_main_grad_that_is_no_input_is_a_fault_of_ours():
    graph = backward_of("dense")
    (total,) = (n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), AccumulateNote))
    with graph.module.graph.inserting_before(total):
        copied = graph.module.graph.call_function(aten.clone.default, (total.args[0],))
    total.update_arg(0, copied)
    with pytest.raises(AssertionError, match="main_grad is no input of the backward graph"):
        accumulate_main_grads(graph.module, PassContext("backward"))


# Preserves.


@pytest.mark.parametrize(
    ("name", "world"),
    [("dense", WORLD), ("grouped", WORLD), ("blocks", WORLD), ("dense", 1), ("experts", 1), ("experts_transposed", 1)],
)
def test_main_grad_gets_bitwise_what_was_returned(name, world):
    before = backward_of(name, world)
    after = JointGraph(before.copy().module, 0, ())
    after.run("accumulate_main_grads")
    order = [n.args[0] for n in after.module.graph.nodes if n.target in WRITES]
    positions = [after.module.graph.find_nodes(op="placeholder").index(n) for n in order]

    before.primals, after.primals = tuple(inputs_of(before)), tuple(inputs_of(after))
    returned = [t for t in before.evaluate() if t is not None]
    returned = [r for r in returned if r.dtype == torch.float32][: len(positions)]
    assert not any(t.dtype == torch.float32 for t in after.evaluate() if t is not None)
    for position, want in zip(positions, returned, strict=True):
        assert torch.equal(after.primals[position], want)


# Idempotent.


@pytest.mark.parametrize(
    ("name", "world"), [("dense", WORLD), ("grouped", WORLD), ("blocks", WORLD), ("leader_only", WORLD), ("experts", 1)]
)
def test_a_second_run_changes_nothing(name, world):
    graph = run(backward_of(name, world), "accumulate_main_grads")
    counts = ops(graph)
    assert_unchanged_by(graph, "accumulate_main_grads")
    assert ops(graph) == counts


def test_the_joint_graph_stays_functional():
    graph = behind("dense", "group_wgrads", "retype_wgrads", "insert_collectives", "recompute_gathers")
    assert not nodes(graph, aten.copy_.default)
