"""gtp_compile.testing: capture, run one pass, count, compare."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from tiny_models import IN, OUT, TorchGroup, ends_of, joint, run, shard_all, sharded
from torch import nn

import gtp_compile
from gtp_compile import testing
from gtp_compile.testing import JointGraph, capture_joint, compare_numerics, count_ops, fake_mesh

BF16 = torch.bfloat16


def documented_example() -> str:
    """What follows the first line of the module's docstring."""
    _, _, example = testing.__doc__.partition("\n")
    return textwrap.dedent(example)


def test_the_documented_example_runs():
    class MyExperts(nn.Module):
        """Two GEMMs, so two weight gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, OUT, IN))
            self.down = nn.Parameter(torch.randn(4, IN, OUT))

        def forward(self, x):
            return (x.to(BF16) @ self.up[0].t()) @ self.down[0].t()

    example = documented_example()
    assert "capture_joint" in example
    names = {"torch": torch, "gtp_compile": gtp_compile, "MyExperts": MyExperts, "x": torch.randn(6, IN)}
    exec(example, names)
    assert not dist.is_initialized()


# fake_mesh


def test_a_fake_mesh_of_any_size_leaves_no_process_group():
    with fake_mesh(64) as mesh:
        assert (mesh.size(), mesh.ndim, dist.get_rank()) == (64, 1, 0)
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_mesh(2):
        1 / 0  # noqa: B018
    assert not dist.is_initialized()


def test_a_fake_mesh_inside_another_is_refused():
    with fake_mesh(2), pytest.raises(RuntimeError, match="a process group is initialised already"), fake_mesh(2):
        pass


# capture_joint


def test_an_unsharded_model_has_no_joint_graph_of_ours():
    with pytest.raises(
        ValueError, match="one joint graph with placed weights is expected, the model gave 0; shard the"
    ):
        capture_joint(nn.Linear(3, 3), torch.randn(2, 3))


def test_a_graph_break_gives_several():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(IN, IN), nn.Linear(IN, IN)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(Broken(), mesh, shard_fn=shard_all)
        with pytest.raises(ValueError, match=r"the model gave 2; .*capture parts of it if it has graph breaks"):
            capture_joint(model, torch.randn(2, IN))
        assert capture_joint(model.second, torch.randn(2, IN)).num_fwd_outputs == 1


def test_all_weights_frozen_is_no_joint_graph():
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(nn.Linear(IN, OUT).requires_grad_(False), mesh, shard_fn=shard_all)
        with pytest.raises(ValueError, match=r"the model gave 0; .*call it where gradients are needed"):
            capture_joint(model, torch.randn(2, IN))


def test_a_capture_leaves_no_trace_in_the_model():
    with fake_mesh(2) as mesh:
        tiny = sharded("dense_bias", mesh)
        before = [p.main_grad.clone() for p in tiny.model.parameters()]
        state = torch.get_rng_state()
        capture_joint(tiny.model, *tiny.args)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in tiny.model.parameters())
        assert all(torch.equal(p.main_grad, b) for p, b in zip(tiny.model.parameters(), before, strict=True))


def test_keyword_arguments_and_compiled_models():
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(TorchGroup(), mesh, shard_fn=shard_all, param_dtype=BF16)
        graph = capture_joint(torch.compile(model, backend="gtp"), torch.randn(6, IN), offs=ends_of(2, 2, 2))
    assert count_ops(graph.module.graph)["gtp.finalize.default"] == 3


# JointGraph


def test_a_copy_is_independent():
    graph = joint("dense")
    copy = graph.copy()
    text = graph.text()
    run(copy, "retype_wgrads")
    assert graph.text() == text != copy.text()


def test_run_says_what_one_pass_did():
    done = joint("dense").run("retype_wgrads")
    assert (done.name, done.phase, done.report.changed) == ("retype_wgrads", "joint", 1)
    assert "aten.mm" in done.before
    assert "gtp.dense_wgrad" in done.after
    assert done.milliseconds > 0
    assert (
        "matched 1, changed 1; aten.mm.default -1, aten.permute.default -1, gtp.dense_wgrad.default +1"
        in done.summary()
    )


def test_run_knows_no_other_names():
    with pytest.raises(KeyError, match="retype"):
        joint("dense").run("retype")


def test_evaluate_is_a_function_of_the_seed():
    graph = joint("dense_bias")
    same, other = graph.evaluate(3), graph.evaluate(4)
    assert all(torch.equal(a, b) for a, b in zip(graph.evaluate(3), same, strict=True) if a is not None)
    assert not torch.equal(same[2], other[2])
    assert len(same) == len(graph.module.graph.output_node().args[0])


# compare_numerics


def test_equal_graphs_differ_by_nothing():
    graph = joint("dense_bias")
    assert compare_numerics(graph, graph.copy()) == [0.0, None, 0.0, None, 0.0, None]


def test_the_difference_is_relative_to_the_first_graph():
    one = _constant(4.0)
    assert compare_numerics(one, _constant(5.0)) == [0.25]
    assert compare_numerics(_constant(0.0), _constant(5.0)) == [pytest.approx(5.0 * 3**0.5)]  # absolute


def test_graphs_with_different_outputs_are_not_compared():
    with pytest.raises(ValueError, match="outputs differ in kind: 6 and 4"):
        compare_numerics(joint("dense_bias"), joint("dense"))


def _constant(value: float) -> JointGraph:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.ops.aten.full_like.default, (x, value))])
    return JointGraph(torch.fx.GraphModule({}, graph), 1, (torch.zeros(3),))
