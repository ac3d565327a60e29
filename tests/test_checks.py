"""The invariants that are checked between passes: what breaks them is named."""

from dataclasses import replace

import pytest
import torch
from tiny_models import MODELS, behind, joint, nodes, partitioned, run, sharded

from gtp_compile.checks import check_graph, check_metadata, check_saved, wrong_metadata
from gtp_compile.graph_log import GraphLog
from gtp_compile.passes.base import PassContext, PassReport, outputs_of
from gtp_compile.passes.describe import check_dtypes, describe_groups, describe_wire
from gtp_compile.passes.emit import insert_call
from gtp_compile.runner import run_passes
from gtp_compile.testing import capture_joint, fake_mesh

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
LOWERED = ("group_wgrads", "retype_wgrads", "fuse_wgrads", "insert_collectives")


def lowered(name: str = "dense"):
    return behind(name, *LOWERED)


# check_graph


@pytest.mark.parametrize("name", ["dense", "grouped", "blocks"])
def test_a_sound_graph_passes(name):
    graph = joint(name)
    check_graph(graph.module)
    check_graph(run(graph, *LOWERED).module)


def test_a_collective_without_a_wait():
    graph = lowered()
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    (wait,) = scatter.users
    wait.replace_all_uses_with(scatter)
    graph.module.graph.erase_node(wait)
    with pytest.raises(RuntimeError, match=rf"{scatter.name}.*exactly one wait as its only user, it has 0 among 1"):
        check_graph(graph.module)


def test_a_collective_that_is_read_without_waiting():
    graph = lowered()
    (scatter,) = nodes(graph, c10d.reduce_scatter_tensor.default)
    with graph.module.graph.inserting_after(scatter):
        insert_call(graph.module.graph, aten.neg.default, (scatter,), like=scatter)
    with pytest.raises(RuntimeError, match="it has 1 among 2 users"):
        check_graph(graph.module)


def test_two_waits():
    graph = lowered()
    (gather,) = nodes(graph, c10d.all_gather_into_tensor.default)
    with graph.module.graph.inserting_after(gather):
        insert_call(graph.module.graph, c10d.wait_tensor.default, (gather,), like=gather)
    with pytest.raises(RuntimeError, match=rf"{gather.name}.*it has 2 among 2 users"):
        check_graph(graph.module)


def test_a_node_without_a_value():
    graph = joint("dense")
    (first, *_) = nodes(graph, aten.mm.default)
    del first.meta["val"]
    with pytest.raises(RuntimeError, match=r"mm.*has no meta\['val'\]; insert nodes with passes.emit.insert_call"):
        check_graph(graph.module)


def test_a_use_before_its_definition():
    graph = joint("dense")
    first, second = nodes(graph, aten.mm.default)
    second.append(first)
    second.update_arg(0, first)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        check_graph(graph.module)


# check_metadata


@pytest.mark.parametrize("name", sorted(MODELS))
def test_true_metadata_passes(name):
    check_metadata(joint(name).module)


def test_a_wrong_dtype():
    graph = joint("dense")
    (_, wgrad) = nodes(graph, aten.mm.default)
    wgrad.meta["val"] = wgrad.meta["val"].float()
    with pytest.raises(RuntimeError, match=r"mm_1.*says torch.float32 \(16, 8\), the operator gives torch.bfloat16"):
        check_metadata(graph.module)


def test_a_wrong_shape():
    graph = joint("dense")
    (_, wgrad) = nodes(graph, aten.mm.default)
    wgrad.meta["val"] = wgrad.meta["val"].t()
    with pytest.raises(
        RuntimeError, match=r"says torch.bfloat16 \(8, 16\), the operator gives torch.bfloat16 \(16, 8\)"
    ):
        check_metadata(graph.module)


def test_what_was_wrong_before_a_pass_is_not_its_fault():
    graph = joint("dense")
    (_, wgrad) = nodes(graph, aten.mm.default)
    wgrad.meta["val"] = wgrad.meta["val"].float()
    wrong = wrong_metadata(graph.module)
    assert list(wrong) == [wgrad]
    check_metadata(graph.module, wrong)
    run_passes(graph.module, (lambda gm, ctx: PassReport(),), PassContext("joint"), GraphLog("test", keep_text=True))


# check_saved


def test_shards_may_be_saved():
    forward, _, num_fwd_outputs = partitioned("blocks")
    check_saved(forward, num_fwd_outputs)


@pytest.mark.parametrize("name", ["blocks", "checkpointed"])  # saved are views of gathered weights, or those themselves
def test_a_gathered_weight_may_not_be_saved(name):
    forward, _, num_fwd_outputs = partitioned(name, without=("recompute_gathers",))
    with pytest.raises(RuntimeError, match="forward would keep a gathered weight alive until backward"):
        check_saved(forward, num_fwd_outputs)


def test_the_user_may_switch_recomputation_off():
    with fake_mesh(2) as mesh:
        tiny = sharded("blocks", mesh)
        capture_joint(tiny.model, *tiny.args, options={"disable": ["recompute_gathers"]})


def test_what_the_model_returns_may_be_a_weight():
    forward, _, _ = partitioned("blocks", without=("recompute_gathers",))
    everything = len(forward.graph.output_node().args[0])
    check_saved(forward, everything)  # all of them outputs of the user's


# check_dtypes


@pytest.mark.parametrize("hop", ["gemm_dtype", "scratch_dtype", "wire_dtype", "sum_dtype"])
def test_a_hop_below_the_rule(hop):
    graph = behind("experts", *LOWERED[:3])
    groups = describe_groups(graph.module.graph)
    run(graph, LOWERED[3])
    groups = describe_wire(graph.module.graph, groups)
    check_dtypes(graph.module.graph, groups, retyped=True)
    lower = [replace(g, **{hop: torch.bfloat16}) for g in groups]
    with pytest.raises(RuntimeError, match=f"its {hop[:-6]} has torch.bfloat16.*please report it"):
        check_dtypes(graph.module.graph, lower, retyped=True)


# The runner


def test_a_pass_that_breaks_something_is_named():
    graph = joint("dense")

    def forget_the_value(gm, ctx):
        with gm.graph.inserting_before(gm.graph.output_node()):
            (mm, *_) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
            node = gm.graph.call_function(aten.neg.default, (mm,))
        mm.replace_all_uses_with(node)
        node.update_arg(0, mm)
        return PassReport()

    def drop_an_output(gm, ctx):
        output = gm.graph.output_node()
        output.args = (list(output.args[0])[:-1],)
        return PassReport()

    log = GraphLog("test", keep_text=True)
    with pytest.raises(RuntimeError, match=r"after pass forget_the_value: .*has no meta\['val'\]"):
        run_passes(joint("dense").module, (forget_the_value,), PassContext("joint"), log)
    with pytest.raises(RuntimeError, match="after pass drop_an_output: the number of the graph's outputs changed from"):
        run_passes(graph.module, (drop_an_output,), PassContext("joint"), log)


def test_metadata_is_derived_again_only_where_somebody_looks():
    def lie(gm, ctx):
        (mm, *_) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        mm.meta["val"] = mm.meta["val"].float()
        return PassReport()

    run_passes(joint("dense").module, (lie,), PassContext("joint"), GraphLog("test"))
    with pytest.raises(RuntimeError, match=r"after pass lie: .*the operator gives torch.bfloat16"):
        run_passes(joint("dense").module, (lie,), PassContext("joint"), GraphLog("test", keep_text=True))


def test_what_a_pass_found_may_have_rules_of_its_own():
    """torch inserts higher-order operators without metadata, a user may start a collective and wait for it twice."""
    graph = joint("dense")
    x = next(iter(graph.module.graph.find_nodes(op="call_function", target=aten.mm.default)))
    with graph.module.graph.inserting_after(x):
        odd = graph.module.graph.call_function(aten.neg.default, (x,))
    graph.module.graph.output_node().args = ((*outputs_of(graph.module.graph), odd),)
    with pytest.raises(RuntimeError, match="has no meta"):
        check_graph(graph.module)
    check_graph(graph.module, given={odd})
