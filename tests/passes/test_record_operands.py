"""record_operands: what `verify` needs to compute a gradient again in float64."""

import pytest
import torch
from tiny_models import BF16, MODELS, anchor_errors, behind, joint, nodes, ops, relative_error, run, wgrad_graph
from wgrad_forms import FORMS, Form, form_id, operands

from gtp_compile.checks import check_graph, check_metadata
from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext
from gtp_compile.passes.record_operands import record_operands
from gtp_compile.testing import JointGraph, compare_numerics
from gtp_compile.verifying import _Float64Run

gtp = torch.ops.gtp


def recorded(graph: JointGraph) -> list[torch.fx.Graph]:
    programs: list[torch.fx.Graph] = []
    record_operands(graph.module, PassContext("joint", graph.num_fwd_outputs, programs=programs))
    graph.module.recompile()
    return programs


# Rewrites.


@pytest.mark.parametrize("name", ["dense_bias", "grouped", "thrice", "leader_only", "scaled"])
def test_every_anchor_is_preceded_by_a_record(name):
    graph = behind(name, "group_wgrads", "retype_wgrads")
    programs = recorded(graph)
    check_graph(graph.module)
    check_metadata(graph.module)
    anchors = Finalize.find(graph.module.graph)
    assert [a.grad.target for a in anchors] == [gtp.record.default] * len(anchors)
    assert [a.grad.args[3] for a in anchors] == list(range(len(programs)))
    assert [a.grad.args[1] for a in anchors] == [a.shards[0] for a in anchors]
    for anchor, program in zip(anchors, programs, strict=True):
        program.lint()
        assert len(anchor.grad.args[2]) == len(program.find_nodes(op="placeholder"))
        assert len(set(anchor.grad.args[2])) == len(anchor.grad.args[2])


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize("passes", [(), ("retype_wgrads",)], ids=["as_captured", "retyped"])
def test_a_program_gives_the_exact_gradient(form: Form, passes):
    given = operands()
    graph = run(wgrad_graph(form.compute, *given), *passes)
    (program,) = recorded(graph)
    (record,) = nodes(graph, gtp.record.default)
    seen = []

    def keep(grad, shard, tensors, program):
        seen.extend(tensors)
        return grad

    record.target = keep
    graph.evaluate()
    exact = _Float64Run(program).run(*seen)
    assert exact.dtype == torch.float64
    assert relative_error(exact, form.reference(*given)) <= 1e-12


def test_the_recorder_of_a_leaf_gets_the_operands_and_not_of_another():
    calls = []
    shard, other = torch.zeros(4, 8), torch.zeros(4, 8)
    shard.recorder = lambda *given: calls.append(given)
    grad, operand = torch.randn(16, 8), torch.randn(24, 8)
    out = gtp.record(grad, shard, [operand], 5)
    assert torch.equal(out, grad)
    assert out.data_ptr() != grad.data_ptr()
    ((leaf, program, tensors),) = calls
    assert leaf is shard
    assert program == 5
    assert torch.equal(tensors[0], operand)
    gtp.record(grad, other, [operand], 5)
    assert len(calls) == 1


# Refuses.


def test_without_a_place_for_programs_it_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="somewhere to keep the programs"):
        record_operands(joint("dense").module, PassContext("joint"))


def test_what_is_unknown_is_an_operand():
    graph = behind("scaled", "retype_wgrads")
    recorded(graph)
    (record,) = nodes(graph, gtp.record.default)
    assert [n.target for n in record.args[2]] == [gtp.widen.default]
    assert anchor_errors(behind("scaled", "retype_wgrads")) == [0.0]  # verify can't see past it


# Preserves.


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"leader_only_torch", "leader_only_transposed"}))
def test_numbers_stay(name):
    before = behind(name, "group_wgrads", "retype_wgrads")
    after = before.copy()
    recorded(after)
    assert {d for d in compare_numerics(before, after) if d is not None} == {0.0}


# Idempotent: a record is no form of a gradient, so a second one holds the first.


def test_a_second_record_takes_the_first_as_its_operand():
    graph = behind("dense", "retype_wgrads")
    recorded(graph)
    counts = ops(graph)
    (program,) = recorded(graph)
    assert (ops(graph) - counts) == {"gtp.record.default": 1}
    assert [n.op for n in program.nodes] == ["placeholder", "output"]
    assert BF16 not in {n.meta["val"].dtype for n in nodes(graph, gtp.record.default)}
