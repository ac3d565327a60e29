"""accumulate_main_grads: in the backward graph, sums are written to main_grad and no gradient is returned."""

import pytest
import torch
from expecttest import assert_expected_inline
from tiny_models import assert_unchanged_by, behind, capture, listing, nodes, ops, partitioned, run, split

from gtp_compile.passes.accumulate_main_grads import accumulate_main_grads
from gtp_compile.passes.base import NOTE, PassContext
from gtp_compile.passes.insert_collectives import AccumulateNote
from gtp_compile.testing import JointGraph

aten = torch.ops.aten


def backward_of(name: str) -> JointGraph:
    return JointGraph(partitioned(name)[1], 0, ())


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


# Refuses.


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


@pytest.mark.parametrize("name", ["dense", "grouped", "blocks"])
def test_main_grad_gets_bitwise_what_was_returned(name):
    before = backward_of(name)
    after = JointGraph(before.copy().module, 0, ())
    after.run("accumulate_main_grads")
    order = [n.args[0] for n in nodes(after, aten.copy_.default)]
    positions = [after.module.graph.find_nodes(op="placeholder").index(n) for n in order]

    before.primals, after.primals = tuple(inputs_of(before)), tuple(inputs_of(after))
    returned = [t for t in before.evaluate() if t is not None]
    returned = [r for r in returned if r.dtype == torch.float32][: len(positions)]
    assert not any(t.dtype == torch.float32 for t in after.evaluate() if t is not None)
    for position, want in zip(positions, returned, strict=True):
        assert torch.equal(after.primals[position], want)


# Idempotent.


@pytest.mark.parametrize("name", ["dense", "grouped", "blocks", "leader_only"])
def test_a_second_run_changes_nothing(name):
    graph = run(backward_of(name), "accumulate_main_grads")
    counts = ops(graph)
    assert_unchanged_by(graph, "accumulate_main_grads")
    assert ops(graph) == counts


def test_the_joint_graph_stays_functional():
    graph = behind("dense", "group_wgrads", "retype_wgrads", "insert_collectives", "recompute_gathers")
    assert not nodes(graph, aten.copy_.default)
