"""The passes together: their order, what they leave, and what they leave alone."""

import re

import pytest
import torch
from tiny_models import (
    MODELS,
    Blocks,
    Dense,
    assert_unchanged_by,
    behind,
    capture,
    joint,
    listing,
    nodes,
    ops,
    run,
    sharded,
)
from torch import nn
from torch.utils._pytree import tree_leaves

import gtp_compile
import gtp_compile.backend
from gtp_compile.checks import check_graph, check_metadata
from gtp_compile.passes.base import NOTE, PassContext
from gtp_compile.passes.insert_collectives import ReduceNote
from gtp_compile.passes.order_collectives import JointOrder, order_collectives
from gtp_compile.passes.ordering import stable_sort
from gtp_compile.pipeline import BACKWARD_PASSES, INFERENCE_PASSES, JOINT_PASSES, PASS_NAMES
from gtp_compile.testing import capture_joint, compare_numerics, fake_mesh

c10d = torch.ops._c10d_functional
gtp = torch.ops.gtp
aten = torch.ops.aten

JOINT = [p.__name__ for p in JOINT_PASSES]
# What computes a gradient: everything between one of these and its reduction is the gradient itself.
SOURCES = {
    gtp.dense_wgrad.default, gtp.grouped_wgrad.default, gtp.grouped_wgrad_parts.default, gtp.widen.default,
    aten.sum.dim_IntList, aten.index_put.default, aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default, aten.index_add.default, aten.embedding_dense_backward.default,
}  # fmt: skip
COLLECTIVES = (
    c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_reduce.default,
    c10d.wait_tensor.default,
)  # fmt: skip


def lowered(name: str, world: int = 4):
    return behind(name, *JOINT, world=world)


# The list.


def test_the_order():
    assert JOINT == [
        "group_wgrads", "retype_wgrads", "fuse_wgrads", "fuse_dgrads", "insert_collectives", "fuse_gathers",
        "fuse_linears", "recompute_gathers",
    ]  # fmt: skip
    assert [p.__name__ for p in BACKWARD_PASSES] == ["accumulate_main_grads", "order_collectives"]
    assert [p.__name__ for p in INFERENCE_PASSES] == ["insert_collectives", "fuse_gathers", "fuse_linears"]


def test_names_are_unique():
    assert len(set(PASS_NAMES)) == len(PASS_NAMES)


def test_every_pass_says_what_it_does_and_leaves():
    for step in (*JOINT_PASSES, *BACKWARD_PASSES):
        module = __import__(step.__module__, fromlist=["_"])
        assert step.__doc__, step.__name__
        for word in ("Before", "After", "Needs", "Leaves"):
            assert word in module.__doc__, f"{step.__name__}: {word}"


# What they leave.


@pytest.mark.parametrize("name", sorted(MODELS))
def test_nothing_narrow_lies_between_a_gemm_and_its_reduction(name):
    graph = lowered(name)
    reductions = [n for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), ReduceNote)]
    assert reductions
    seen, todo = set(), list(reductions)
    while todo:
        node = todo.pop()
        dtypes = {t.dtype for t in tree_leaves(node.meta["val"]) if t.is_floating_point()}
        if node in seen or not dtypes:
            continue
        seen.add(node)
        assert dtypes == {torch.float32}, f"{node.name}: {node.target}"
        todo += [] if node.target in SOURCES else node.all_input_nodes
    assert {n.target for n in seen} & SOURCES


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_reduction_for_each_weight_group_with_a_gradient(name):
    graph = behind(name, "group_wgrads")
    shards = {tuple(a.args[1]) for a in nodes(graph, gtp.finalize.default)}
    run(graph, *JOINT[1:])
    reductions = [n.meta[NOTE].inputs for n in graph.module.graph.nodes if isinstance(n.meta.get(NOTE), ReduceNote)]
    assert len(reductions) == len(set(reductions)) == len(shards)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_result_is_sound(name):
    graph = lowered(name)
    check_graph(graph.module)
    check_metadata(graph.module)


@pytest.mark.parametrize("name", ["dense_bias", "grouped", "thrice", "leader_only_torch", "blocks", "checkpointed"])
def test_a_second_run_of_all_changes_nothing(name):
    graph = lowered(name)
    for step in JOINT:
        assert_unchanged_by(graph, step)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_forward_is_bitwise_the_same(name):
    before = joint(name)
    differences = compare_numerics(before, lowered(name))[: before.num_fwd_outputs]
    assert {d for d in differences if d is not None} == {0.0}


def test_rows_may_be_symbolic():
    with fake_mesh(4) as mesh:
        tiny = sharded("grouped", mesh)
        x, m_splits = tiny.args
        torch._dynamo.mark_dynamic(x, 0)
        graph = capture_joint(tiny.model, x, m_splits)
    (dy, *_) = nodes(graph, gtp.grouped_wgrad.default)[0].args
    assert isinstance(dy.meta["val"].shape[0], torch.SymInt)
    run(graph, *JOINT)
    assert not any(isinstance(s, torch.SymInt) for n in nodes(graph, aten.view.default) for s in n.args[1])


# Every rank, every time, the same.


@pytest.mark.parametrize("name", ["dense_bias", "experts", "grouped", "blocks"])
def test_two_and_four_ranks_differ_in_constants_only(name):
    two, four = lowered(name, 2), lowered(name, 4)

    def shape_of(graph):
        return [re.sub(r"\d+", "#", line) for line in listing(graph.module.graph.nodes).splitlines()]

    assert shape_of(two) == shape_of(four)
    assert listing(two.module.graph.nodes) != listing(four.module.graph.nodes)
    # Before the first pass the size of the group is a constant already: compile caches are keyed by the graph.
    assert joint(name, 2).text() != joint(name, 4).text()


@pytest.mark.parametrize("name", ["grouped", "blocks", "checkpointed"])
def test_the_order_of_collectives_is_that_of_every_capture(name):
    def sequence(graph):
        return [listing([n]) for n in graph.module.graph.nodes if n.target in COLLECTIVES]

    first, second = (sequence(run(capture(name), *JOINT)) for _ in range(2))
    assert first == second
    assert first


def test_three_equal_blocks_in_one_graph():
    """One reduction for each of the twelve weights; the blocks' parts of the graph are alike."""
    counts = ops(lowered("blocks"))
    assert counts["gtp.dense_wgrad.default"] == 6
    assert counts["_c10d_functional.reduce_scatter_tensor.default"] == 6  # two matrices each
    assert counts["_c10d_functional.all_reduce.default"] == 6  # the norm's weight and bias


def test_three_equal_blocks_compiled_one_by_one_share_one_graph(monkeypatch):
    """No constant in the graph names a layer."""
    compiled = spy_on_compile_fx(monkeypatch)
    with fake_mesh(4) as mesh:
        model = sharded("blocks", mesh).model
        x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
        for block in model.blocks:
            block.compile(backend="gtp", options={"inner": "eager"})
            x = block(x)
    assert len(compiled) == 1


# A model that is not ours.


def spy_on_compile_fx(monkeypatch) -> list[dict]:
    calls: list[dict] = []
    original = gtp_compile.backend.compile_fx

    def spy(gm, example_inputs, **kwargs):
        calls.append(kwargs)
        return original(gm, example_inputs, **kwargs)

    monkeypatch.setattr(gtp_compile.backend, "compile_fx", spy)
    return calls


def test_a_plain_model_gets_none_of_our_patches(monkeypatch):
    calls: list[dict] = []

    def instead(gm, example_inputs, **kwargs):
        calls.append(kwargs)
        return gm.forward

    monkeypatch.setattr(gtp_compile.backend, "compile_fx", instead)
    model = Dense()
    torch.compile(model.to(torch.bfloat16), backend="gtp")(torch.randn(3, 8))
    assert [{k: v for k, v in c.items() if v} for c in calls] == [{}]

    torch._dynamo.reset()
    torch.compile(model, backend="gtp", options={"max_autotune": True})(torch.randn(3, 8))
    assert calls[-1] == {"config_patches": {"max_autotune": True}}


def test_a_sharded_model_gets_the_partitioner(monkeypatch):
    calls = spy_on_compile_fx(monkeypatch)
    with fake_mesh(2) as mesh:
        tiny = sharded("dense", mesh)
        torch.compile(tiny.model, backend="gtp", options={"inner": "eager"})(*tiny.args)
    ((patches, inner),) = [(c["config_patches"], c["inner_compile"]) for c in calls]
    assert type(patches["custom_partitioner_fn"]).__name__ == "GtpPartitioner"
    assert inner is not None


def test_the_unplaced_part_of_a_model_is_compiled_as_by_inductor(monkeypatch):
    """A graph break parts a sharded module from a plain one."""
    calls: list[dict] = []

    def instead(gm, example_inputs, **kwargs):
        calls.append(kwargs)
        return gm.forward

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.plain = Dense(8), nn.Linear(8, 8, dtype=torch.bfloat16)

        def forward(self, x):
            x = self.ours(x)
            torch._dynamo.graph_break()
            return self.plain(x)

    monkeypatch.setattr(gtp_compile.backend, "compile_fx", instead)
    with fake_mesh(1) as mesh:
        model = gtp_compile.shard(
            Parted(), mesh, param_dtype=torch.bfloat16,
            shard_fn=lambda fqn, m, p: torch.distributed.tensor.Replicate() if fqn.startswith("ours") else None,
        )  # fmt: skip
        torch.compile(model, backend="gtp")(torch.randn(3, 8))
    assert ["custom_partitioner_fn" in (c["config_patches"] or {}) for c in calls] == [True, False]


def test_under_no_grad_only_gathers_are_inserted():
    with fake_mesh(4) as mesh:
        tiny = sharded("blocks", mesh)
        assert isinstance(tiny.model, Blocks)
        seen = []
        original = gtp_compile.backend.lower_inference

        def keep(gm, *rest):
            original(gm, *rest)
            seen.append(gm)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(gtp_compile.backend, "lower_inference", keep)
            torch.compile(tiny.model, backend="gtp", options={"inner": "eager"})(*tiny.args)
    (gm,) = seen
    assert len(nodes(gm.graph, c10d.all_gather_into_tensor.default)) == 6
    assert not nodes(gm.graph, c10d.reduce_scatter_tensor.default)
    assert not nodes(gm.graph, gtp.materialize.default)


def test_collectives_that_need_one_another_keep_their_order_when_backward_repeats_them():
    """Ten and more of a kind: as text, all_reduce_10 stands before all_reduce_2."""
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    value = x
    for _ in range(12):
        start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (value, "sum", "0"))
        value = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    grad = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, value))
    graph.output([value, grad])
    joint_order = JointOrder(graph, num_fwd_outputs=1)
    module = torch.fx.GraphModule({}, graph)
    names = [n.name for n in graph.nodes]
    report = order_collectives(module, PassContext("backward", joint_order=joint_order))
    assert (report.matched, report.changed) == (12, 0)
    assert [n.name for n in module.graph.nodes] == names


@pytest.mark.parametrize("has_size", [False, True])
def test_what_only_backward_reads_says_nothing_of_the_order(has_size):
    """A size that nothing needs in the end, for one: a rank may have it, and another not."""
    graph = torch.fx.Graph()
    a, b, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    gathered = {}
    for shard in (b, a):
        start = graph.call_function(c10d.all_gather_into_tensor.default, (shard, 2, "0"))
        gathered[shard] = graph.call_function(c10d.wait_tensor.default, (start,))
    out = graph.call_function(aten.add.Tensor, (gathered[a], gathered[b]))
    if has_size:
        graph.call_function(aten.sym_size.int, (gathered[b], 0))
    grad = graph.call_function(aten.mul.Tensor, (tangent, gathered[a]))
    grad = graph.call_function(aten.mul.Tensor, (grad, gathered[b]))
    graph.output([out, grad])
    module = torch.fx.GraphModule({}, graph)
    order_collectives(module, PassContext("backward", joint_order=JointOrder(graph, num_fwd_outputs=1)))
    assert [n.args[0] for n in nodes(module.graph, c10d.all_gather_into_tensor.default)] == [a, b]


def test_an_order_that_would_close_a_cycle_is_an_error():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.neg.default, (x,))
    second = graph.call_function(torch.ops.aten.neg.default, (first,))
    graph.output(second)
    with pytest.raises(RuntimeError, match="neg_default: must come before itself"):
        stable_sort(graph, {first: second})
