"""Another tool's distributed weights in `GroupedLinear`: every hook is routed, TransformerEngine's promises kept.

[module, ops] are TransformerEngine's two constructors, [all distributed, leader only] who of the group bears the
protocol. See `hooked_weights` for the fake hooks' factors. Each wgrad allocation site of TransformerEngine's pull
request 3397 has its tests here; README.md has the table.
"""

import re
from pathlib import Path

import pytest
import torch
from hooked_weights import BACKWARD, BF16, FINALIZE, FORWARD, FP32, Hooked, hook, maybe_compiled
from tiny_models import nodes
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.session import Session
from gtp_compile.testing import capture_joint, fake_mesh
from gtp_compile.watched import run_watched

E, IN, OUT = 3, 8, 16
COUNTS = (5, 0, 7)
NAMES = [f"weight{i}" for i in range(E)]

both_forms = pytest.mark.parametrize("form", ["module", "ops"])
both_groups = pytest.mark.parametrize("leader_only", [False, True], ids=["all distributed", "leader only"])
both_modes = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def make(form: str = "ops", dtype: torch.dtype = FP32, **options) -> GroupedLinear:
    if form == "ops":
        return GroupedLinear(E, IN, OUT, bias=False, device="cpu", dtype=dtype, **options)
    return GroupedLinear(
        E, IN, OUT, bias=False, device="cpu", params_dtype=dtype, fuse_wgrad_accumulation=False, **options
    )


def twin_of(op: GroupedLinear) -> GroupedLinear:
    twin = GroupedLinear(E, IN, OUT, bias=False, dtype=FP32, single_grouped_weight=op.single_grouped_weight)
    twin.load_state_dict({k: v.float() for k, v in op.state_dict().items()})
    return twin


def inputs(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(COUNTS), IN).to(dtype).requires_grad_()
    return x, torch.tensor(COUNTS, dtype=torch.int64)


def step(op, x: Tensor, splits) -> Tensor:
    """Forward, and backward of a loss whose gradient differs from element to element."""
    y = op(x, splits)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return y.detach()


def twin_step(op: GroupedLinear, x: Tensor) -> tuple[GroupedLinear, Tensor, Tensor]:
    twin = twin_of(op)
    x = x.detach().float().requires_grad_()
    y = step(twin, x, torch.tensor(COUNTS))
    return twin, y, x.grad


# Routing.


@both_modes
@both_groups
@both_forms
def test_every_hook_is_routed_once_and_in_order(form, leader_only, compiled):
    op = make(form)
    leader = hook(op, NAMES, leader_only=leader_only)
    x, splits = inputs()
    y = step(maybe_compiled(op, compiled), x, splits)
    twin, twin_y, twin_dx = twin_step(op, x)
    assert leader.calls == ["forward", "backward", "finalize"]
    torch.testing.assert_close(y, FORWARD * twin_y)
    torch.testing.assert_close(x.grad, BACKWARD * twin_dx)
    for name in NAMES:
        weight = getattr(op, name)
        torch.testing.assert_close(weight.main_grad, FINALIZE * getattr(twin, name).grad)
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is not None and not weight.grad.any(), "a dummy, and nothing that could harm who adds it"


@both_modes
@both_groups
@both_forms
def test_finalize_gets_the_dtype_of_the_rule(form, leader_only, compiled):
    op = make(form, BF16)
    leader = hook(op, NAMES, leader_only=leader_only)
    x, splits = inputs(BF16)
    step(maybe_compiled(op, compiled), x, splits)
    assert leader.dtypes == [FP32] * E
    for name in NAMES:
        torch.testing.assert_close(getattr(op, name).main_grad, FINALIZE * exact_wgrad(op, x, name))


def test_no_bit_is_lost_before_finalize():
    op = make("ops", BF16)
    hook(op, NAMES)
    x = torch.full((2, IN), 1.0078125, dtype=BF16)  # its square has more bits than bfloat16
    op(x, [2, 0, 0]).backward(torch.full((2, OUT), 1.0078125, dtype=BF16))
    assert torch.equal(op.weight0.main_grad, torch.full((OUT, IN), FINALIZE * 2 * 1.0078125**2))


@both_modes
def test_main_grad_counts_from_the_next_step_on(compiled):
    op = make("ops", BF16)
    leader = hook(op, NAMES, main_grad=None, leader_only=True, returns="none")
    op.weight1.main_grad = torch.zeros(OUT, IN)  # a follower's does not count
    run = maybe_compiled(op, compiled)
    x, splits = inputs(BF16)
    for main_grad in (None, FP32, torch.float16):
        leader.dtypes.clear()
        leader.buffer = None
        leader.main_grad = None if main_grad is None else torch.zeros(OUT, IN, dtype=main_grad)
        step(run, x, splits)
        assert leader.dtypes == [main_grad or BF16] * E


@both_modes
@pytest.mark.parametrize("splits", ["host", "device"])
@pytest.mark.parametrize("stacked", [False, True], ids=["discrete", "stacked"])
def test_host_and_device_splits_stacked_and_discrete(stacked, splits, compiled):
    op = make("ops", BF16, single_grouped_weight=stacked)
    names = ["weight"] if stacked else NAMES
    leader = hook(op, names)
    x, device_splits = inputs(BF16)
    step(maybe_compiled(op, compiled), x, list(COUNTS) if splits == "host" else device_splits)
    assert leader.dtypes == [FP32] * len(names)
    assert leader.addresses == [getattr(op, n).buffer.data_ptr() for n in names]
    for name in names:
        assert torch.equal(getattr(op, name).main_grad, FINALIZE * exact_wgrad(op, x, name))


def exact_wgrad(op: GroupedLinear, x: Tensor, name: str) -> Tensor:
    dy = torch.linspace(-1, 1, x.shape[0] * OUT).reshape(-1, OUT).to(x.dtype)
    offs = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    wgrad = gtp_compile.kernels.grouped_wgrad(dy, x.detach(), offs, out_dtype=FP32)
    return wgrad if name == "weight" else wgrad[int(name.removeprefix("weight"))]


# Buffers.


class Shards(Hooked):
    """One row of a weight is kept; the whole ones lie packed, as an all-gather leaves them."""

    def _scaled(self, factor: float) -> list[Tensor]:
        return list(self.packed)

    def grad_buffer(self) -> Tensor:
        return self.whole_grad

    def finalize_group_grads(self, wgrads):
        self.addresses += [g.data_ptr() for g in wgrads]
        return None


@both_modes
def test_the_brought_buffers_are_written_and_nothing_of_their_size_is_allocated(compiled):
    wide, few = 128, 4
    op = GroupedLinear(2, wide, wide, bias=False)
    weights = [Shards(torch.zeros(1, wide)) for _ in range(2)]
    for i, weight in enumerate(weights):
        weight.set_up(weights)
        weight.packed = torch.randn(2, wide, wide)
        weight.main_grad = torch.zeros(1, wide)
        weight.whole_grad = torch.full((wide, wide), float("nan"))
        setattr(op, f"weight{i}", weight)
    x = torch.randn(few, wide, requires_grad=True)
    run = maybe_compiled(op, compiled)
    run(x, torch.tensor([3, 1])).sum().backward()  # compiles
    weights[0].addresses.clear()
    y = run(x, torch.tensor([3, 1]))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    largest = max(e.cpu_memory_usage for e in profile.events())
    assert 0 < largest < wide * wide * 4, "a wgrad-sized allocation"
    assert weights[0].addresses == [w.whole_grad.data_ptr() for w in weights]
    assert torch.equal(weights[0].whole_grad, torch.ones(3, wide).t() @ x.detach()[:3])
    assert torch.equal(weights[1].whole_grad, torch.ones(1, wide).t() @ x.detach()[3:])


def test_plain_followers_get_scratch_of_the_leaders_dtype():
    op = make("ops", BF16)
    leader = hook(op, NAMES, leader_only=True)
    x, splits = inputs(BF16)
    step(op, x, splits)
    assert leader.addresses[0] == leader.buffer.data_ptr()
    assert leader.dtypes == [FP32] * E


def test_a_narrow_buffer_is_reported_once(caplog):
    op = make("ops", BF16)
    leader = hook(op, NAMES)
    leader.buffer = torch.empty(OUT, IN, dtype=BF16)
    x, splits = inputs(BF16)
    step(op, x, splits)
    step(op, x, splits)
    assert caplog.text.count("narrower than main_grad's torch.float32") == 1


def test_a_buffer_over_the_weight_itself_is_refused():
    op = make()
    hook(op, NAMES)
    op.weight1.buffer = op.weight1.data
    x, splits = inputs()
    with pytest.raises(RuntimeError, match="Member 1 of the group brought its own weight's memory"):
        step(op, x, splits)


# What finalize returns.


@both_modes
def test_none_means_that_the_reduction_ends_later(compiled):
    op = make()
    hook(op, NAMES, returns="none")
    x, splits = inputs()
    step(maybe_compiled(op, compiled), x, splits)
    for name in NAMES:
        weight = getattr(op, name)
        assert weight.grad_added_to_main_grad is True
        assert not weight.grad.any()


@both_modes
@pytest.mark.parametrize("returns", ["gradients", "none", "dummies"])
def test_one_weight_gets_and_returns_a_bare_tensor(returns, compiled):
    op = gtp_compile.Linear(IN, OUT, bias=True)
    leader = hook(op, ["weight"], returns=returns)
    x = torch.randn(2, 3, IN, requires_grad=True)
    y = maybe_compiled(op, compiled)(x)
    y.backward(torch.ones_like(y))
    wgrad = torch.ones(6, OUT).t() @ x.detach().reshape(6, IN)
    assert leader.calls == ["forward", "backward", "finalize"]
    torch.testing.assert_close(y, FORWARD * x @ op.weight.detach().t() + op.bias)
    torch.testing.assert_close(x.grad, BACKWARD * torch.ones(2, 3, OUT) @ op.weight.detach())
    assert torch.equal(op.bias.grad, torch.full((OUT,), 6.0))
    if returns == "gradients":
        torch.testing.assert_close(op.weight.grad, FINALIZE * wgrad)
        assert op.weight.grad_added_to_main_grad is False, "the trainer adds it"
    else:
        torch.testing.assert_close(op.weight.main_grad, FINALIZE * wgrad)
        assert not op.weight.grad.any()


@both_modes
def test_returned_gradients_accumulate_in_grad(compiled):
    op = make()
    hook(op, NAMES, main_grad=None, returns="gradients")
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    step(run, x, splits)
    step(run, x, splits)
    for name in NAMES:
        torch.testing.assert_close(getattr(op, name).grad, 2 * FINALIZE * exact_wgrad(op, x, name))


def test_a_flag_of_an_earlier_microbatch_makes_no_dummy_of_a_gradient():
    op = make()
    hook(op, NAMES, returns="gradients")
    op.weight0.grad_added_to_main_grad = True
    x, splits = inputs()
    step(op, x, splits)
    torch.testing.assert_close(op.weight0.grad, FINALIZE * exact_wgrad(op, x, "weight0"))
    assert op.weight0.grad_added_to_main_grad is False


class WrongGradients(Hooked):
    def finalize_group_grads(self, wgrads):
        return wgrads[:-1] if self.returns == "count" else [g[:1] for g in wgrads]


@pytest.mark.parametrize(
    ("returns", "message"), [("count", "returned 2 gradients for 3"), ("shape", r"shape \(1, 8\) for member 0")]
)
def test_gradients_that_do_not_fit_are_refused(returns, message):
    op = make()
    hook(op, NAMES, returns=returns, cls=WrongGradients)
    x, splits = inputs()
    with pytest.raises(RuntimeError, match=message):
        step(op, x, splits)


def test_a_gradient_that_autograd_rounds_is_reported(caplog):
    op = make("ops", BF16)
    leader = hook(op, NAMES, main_grad=None, returns="gradients")
    leader.buffer = torch.empty(OUT, IN)  # wider than the parameter, and no main_grad to keep it
    x, splits = inputs(BF16)
    step(op, x, splits)
    assert "autograd rounds it to the parameter's torch.bfloat16" in caplog.text


# Who is asked.


@both_modes
def test_a_frozen_member_gets_no_gradient_and_is_asked_for_no_buffer(compiled):
    op = make("ops", BF16)
    leader = hook(op, NAMES)
    op.weight2.requires_grad_(False)
    x, splits = inputs(BF16)
    step(maybe_compiled(op, compiled), x, splits)
    assert leader.dtypes == [FP32, FP32, None]
    assert op.weight2.buffer is None and op.weight2.grad is None and not op.weight2.main_grad.any()
    assert torch.equal(op.weight0.main_grad, FINALIZE * exact_wgrad(op, x, "weight0"))


def test_a_frozen_leader_still_speaks_for_the_dtype():
    op = make("ops", BF16)
    leader = hook(op, NAMES)
    leader.requires_grad_(False)
    x, splits = inputs(BF16)
    step(op, x, splits)
    assert leader.dtypes == [None, FP32, FP32] and leader.buffer is None
    assert torch.equal(op.weight2.main_grad, FINALIZE * exact_wgrad(op, x, "weight2"))


@both_modes
def test_frozen_weights_and_inputs_without_gradient_cost_no_hook(compiled):
    op = make()
    leader = hook(op, NAMES)
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    step(run, x.detach(), splits)
    assert leader.calls == ["forward", "finalize"]
    op.requires_grad_(False)
    leader.calls.clear()
    step(run, x, splits)
    assert leader.calls == ["forward", "backward"]
    leader.calls.clear()
    with torch.no_grad():
        run(x, splits)
    assert leader.calls == ["forward"]


@both_modes
def test_a_backward_that_asks_for_the_input_alone_finalizes_nothing(compiled):
    op = make()
    leader = hook(op, NAMES)
    x, splits = inputs()
    y = maybe_compiled(op, compiled)(x, splits)
    torch.autograd.grad(y.sum(), x)
    assert leader.calls == ["forward", "backward"]
    assert not op.weight0.main_grad.any() and op.weight0.grad is None


# Orders of running.


@both_modes
def test_interleaved_microbatches(compiled):
    op = make()
    leader = hook(op, NAMES)
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    first, second = run(x, splits), run(2 * x, splits)
    first.backward(torch.ones_like(first))
    second.backward(torch.ones_like(second))
    assert leader.calls == ["forward", "forward", "backward", "finalize", "backward", "finalize"]
    wgrad = torch.ones(COUNTS[0], OUT).t() @ x.detach()[: COUNTS[0]]
    torch.testing.assert_close(op.weight0.main_grad, 3 * FINALIZE * wgrad)


class Checkpointed(nn.Module):
    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.op(torch.tanh(x), splits)), x, use_reentrant=False)


@both_modes
def test_checkpointing_materializes_again_and_finalizes_once(compiled):
    op = make()
    leader = hook(op, NAMES)
    x, splits = inputs()
    step(maybe_compiled(Checkpointed(op), compiled), x, splits)
    assert leader.calls == ["forward", "forward", "backward", "finalize"]


@both_modes
def test_saved_tensor_hooks_that_copy_lose_no_hook(compiled):
    op = make()
    leader = hook(op, NAMES)
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = run(x, splits)
    y.sum().backward()
    assert leader.calls == ["forward", "backward", "finalize"]
    assert all(getattr(op, n).grad_added_to_main_grad for n in NAMES)


@both_modes
def test_a_weight_replaced_after_the_first_step_counts(compiled):
    op = make()
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    plain = step(run, x, splits)
    leader = hook(op, NAMES)
    assert torch.equal(step(run, x, splits), FORWARD * plain)
    assert leader.calls == ["forward", "backward", "finalize"]


@both_modes
def test_autocast_casts_what_the_hooks_return(compiled):
    op = make("ops", FP32)
    leader = hook(op, NAMES)
    run = maybe_compiled(op, compiled)
    x, splits = inputs()
    with torch.autocast("cpu", BF16):
        y = run(x, splits)
    y.backward(torch.ones_like(y))
    assert y.dtype == BF16 and x.grad.dtype == FP32
    assert leader.dtypes == [FP32] * E


# Beside our own collectives.


class Swiglu(nn.Module):
    """fc1, SwiGLU, fc2: the experts that TransformerEngine fuses."""

    def __init__(self, dtype: torch.dtype = FP32, stacked: bool = False) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(E, IN, 2 * OUT, bias=False, dtype=dtype, single_grouped_weight=stacked)
        self.fc2 = GroupedLinear(E, OUT, IN, bias=False, dtype=dtype, single_grouped_weight=stacked)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        gate, up = self.fc1(x, splits).chunk(2, dim=-1)
        return self.fc2(torch.nn.functional.silu(gate) * up, splits)


@both_modes
@pytest.mark.parametrize(
    ("fc1", "fc2"),
    [(FP32, FP32), (FP32, BF16), (None, FP32), (FP32, None)],
    ids=["same main_grad", "different main_grad", "fc2 only", "fc1 only"],
)
@pytest.mark.parametrize("stacked", [False, True], ids=["discrete", "stacked"])
def test_fc1_swiglu_fc2_each_by_its_own_leader(stacked, fc1, fc2, compiled):
    mlp, names = Swiglu(BF16, stacked), ["weight"] if stacked else NAMES
    leaders = {n: hook(getattr(mlp, n), names, main_grad=d) for n, d in (("fc1", fc1), ("fc2", fc2)) if d}
    x, splits = inputs(BF16)
    step(maybe_compiled(mlp, compiled), x, splits)
    for name, dtype in (("fc1", fc1), ("fc2", fc2)):
        if dtype is None:
            grad = getattr(getattr(mlp, name), names[0]).grad
            assert grad.dtype == BF16 and grad.any(), "a plain group goes on as ever"
        else:
            assert leaders[name].calls == ["forward", "backward", "finalize"]
            assert leaders[name].dtypes == [dtype] * len(names)
            assert leaders[name].main_grad.any()


def place_fc1(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | None:
    return Shard(0) if fqn.startswith("fc1") else None


def test_one_reduction_a_group_theirs_or_ours():
    with fake_mesh(2) as mesh:
        mlp = Swiglu()
        hook(mlp.fc2, NAMES)
        gtp_compile.shard(mlp, mesh, src_data_rank=None)
        assert isinstance(mlp.fc2.weight0, Hooked), "left to its owner"
        joint = capture_joint(mlp, *inputs())
        for name in ("group_wgrads", "retype_wgrads", "fuse_wgrads", "insert_collectives"):
            joint.run(name)
        graph = joint.module.graph
        assert len(nodes(graph, torch.ops._c10d_functional.reduce_scatter_tensor.default)) == 1  # fc1's
        assert len(nodes(graph, torch.ops.gtp.hooked_wgrad.default)) == 1  # fc2's


def test_hooks_and_collectives_keep_the_joint_graphs_order():
    with fake_mesh(2) as mesh:
        mlp = Swiglu()
        hook(mlp.fc2, NAMES)
        gtp_compile.shard(mlp, mesh, src_data_rank=None)
        session = Session(dry=True)
        run_watched(mlp, session, None, inputs(), {})
        last = [run for run in session.graphs[0].log.runs if run.name == "order_collectives"][-1]
        assert last.report.matched == 4  # hooked_dgrad, hooked_wgrad, fc1's gather for dgrad, its reduce-scatter
        wanted = ("hooked_dgrad", "hooked_wgrad", "all_gather_into_tensor", "reduce_scatter_tensor")
        calls = [line.split(" = torch.ops.")[1] for line in last.after.splitlines() if " = torch.ops." in line]
        order = [name for call in calls for name in wanted if call.split(".")[1] == name]
        assert order == list(wanted)


def test_shard_makes_a_dense_layer_ask_the_hooks():
    with fake_mesh(2) as mesh:
        model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN))
        leader = hook(model[0], ["weight"])
        gtp_compile.shard(model, mesh, src_data_rank=None)
        assert isinstance(model[0], gtp_compile.Linear) and model[0].weight is leader
        model(torch.randn(3, IN)).sum()
        assert leader.calls == ["forward"]


def test_explain_says_who_reduces_and_runs_no_hook():
    model = Swiglu(BF16)
    leader = hook(model.fc2, NAMES)
    (row,) = gtp_compile.explain(model)(*inputs(BF16)).groups
    assert row.weights == [f"fc2.{n}" for n in NAMES] and row.matched
    assert row.reason == "reduced by finalize_group_grads of Hooked"
    assert (row.gemm_dtype, row.main_grad_dtype, row.wire_dtype) == ("float32", "float32", None)
    assert leader.calls == []


# Refusals.


def test_a_compiled_graph_that_reads_a_shard_as_a_weight_is_refused():
    model = nn.Sequential(nn.Linear(IN, OUT))
    hook(model[0], ["weight"])
    with pytest.raises(Exception, match=r"0\.weight: a Hooked bears the .* protocol, but .*; use gtp_compile\.Linear"):
        maybe_compiled(model, True)(torch.randn(3, IN))


def test_a_compiled_optimizer_step_may_read_the_shard():
    weight = Hooked(torch.ones(3))
    weight.set_up([weight])
    torch.compile(lambda w: w * 0.5, backend="gtp", fullgraph=True, options={"inner": "eager"})(weight)
    assert weight.calls == []


def test_shard_refuses_a_module_that_does_not_ask():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(OUT, IN))

    model = nn.Sequential(Own())
    hook(model[0], ["up"])
    with fake_mesh(2) as mesh, pytest.raises(ValueError, match=r"0\.up: a Hooked .* but a Own reads it"):
        gtp_compile.shard(model, mesh, src_data_rank=None)


def test_a_distributed_follower_of_a_plain_leader_is_refused():
    op = make()
    hook(op, ["weight1", "weight2"])
    with pytest.raises(ValueError, match=r"weight1: .* the leader of its group, weight0, does not"):
        op(*inputs())


def test_one_group_has_one_owner():
    with fake_mesh(2) as mesh:
        op = make()
        gtp_compile.shard(op, mesh, shard_fn=lambda f, m, p: Shard(0) if f == "weight1" else None, src_data_rank=None)
        hook(op, ["weight0"])
        with pytest.raises(ValueError, match=r"weight1: is placed by gtp_compile\.shard, but the leader"):
            op(*inputs())


def test_a_distributed_bias_is_refused():
    op = GroupedLinear(E, IN, OUT)
    hook(op, ["bias0"])
    with pytest.raises(ValueError, match=r"bias0: bears .* keep biases plain"):
        op(*inputs())


class HalfWeights(Hooked):
    def _scaled(self, factor: float):
        return [w.detach()[:1] for w in self.group] if self.returns == "shape" else [w.bfloat16() for w in self.group]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("shape", r"shape \(1, 8\) for member 0 .* \(16, 8\)"),
        ("dtype", "torch.bfloat16, but the input is torch.float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(returns, message):
    op = make()
    hook(op, NAMES, returns=returns, cls=HalfWeights)
    with pytest.raises(RuntimeError, match=message):
        op(*inputs())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("delay_wgrad_compute", "reduced in the backward that computes them"),
        ("fuse_wgrad_accumulation", "options={'accumulate_into_main_grad': True}"),
        ("accumulate_into_main_grad", "never added to its"),
    ],
)
def test_options_that_are_not_supported_say_why(option, message):
    with pytest.raises(ValueError, match=option) as caught:
        make("ops", **{option: True})
    assert message in str(caught.value)


def test_two_names_of_the_dtype_must_agree():
    with pytest.raises(ValueError, match="params_dtype"):
        GroupedLinear(E, IN, OUT, dtype=FP32, params_dtype=BF16)


def test_the_readme_names_tests_that_exist():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = readme.split("<!-- sites:begin -->")[1].split("<!-- sites:end -->")[0]
    named = re.findall(r"`(test_\w+)", table)
    assert len(named) >= 9
    assert all(callable(globals().get(name)) for name in named), named
