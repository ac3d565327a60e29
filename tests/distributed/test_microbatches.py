"""Several forwards and backwards between two optimizer steps: what main_grad holds afterwards."""

import functools
from typing import Any

import pytest
import torch
from dist_helpers import (
    BF16,
    FP32,
    close_main_grad,
    compiled,
    double_leaf,
    expect,
    linear64,
    reduced,
    reductions,
    sharded,
    spy,
)
from ranks import run_ranks
from tiny_models import ends_of
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gtp_compile


class Mlp(nn.Module):
    """x bf16[R, 16] -> [R, 32] -> [R, 16]; `twice` uses both weights twice, `checkpointed` recomputes."""

    def __init__(self, twice: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)
        self.times = 2 if twice else 1
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return x


class Twin:
    """The same layers on this rank's rows, weight gradients in float64."""

    def __init__(self, model: Mlp) -> None:
        self.up, self.down = double_leaf(model.up.weight), double_leaf(model.down.weight)
        self.times = model.times

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + linear64(torch.relu(linear64(x, self.up)), self.down)
        return x

    def compare(self, model: Mlp) -> None:
        for param, leaf in ((model.up.weight, self.up), (model.down.weight, self.down)):
            close_main_grad(param, reduced(leaf.grad))

    def zero_grad(self) -> None:
        self.up.grad = self.down.grad = None


def rows(rank: int, step: int, count: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 16, generator=generator).to(BF16)


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def start(**kwargs: bool):
    torch.manual_seed(1)
    model = Mlp(**kwargs)
    twin = Twin(model)
    sharded(model)
    return model, twin, compiled(model)


def microbatches(rank: int, count: int, forwards_first: bool) -> None:
    model, twin, step = start()
    with spy() as seen:
        if forwards_first:
            losses = [loss(step(rows(rank, i))) for i in range(count)]
            for value in losses:
                value.backward()
        else:
            for i in range(count):
                loss(step(rows(rank, i))).backward()
    for i in range(count):
        loss(twin(rows(rank, i))).backward()
    twin.compare(model)
    expect("reduce-scatters", len(reductions(seen)), 2 * count)


@pytest.mark.parametrize(
    ("count", "forwards_first"), [(4, False), (3, True)], ids=["four_in_turn", "three_forwards_then_three_backwards"]
)
def test_microbatches_add_up(count, forwards_first):
    run_ranks(microbatches, 2, count, forwards_first)


def zeroed(rank: int, set_to_none: bool, between: str) -> None:
    model, twin, step = start()
    for i in range(3):
        if between == "steps":
            model.zero_grad(set_to_none=set_to_none)
        value = loss(step(rows(rank, i)))
        if between == "forward_and_backward":
            model.zero_grad(set_to_none=set_to_none)
        value.backward()
        twin.zero_grad()
        loss(twin(rows(rank, i))).backward()
        twin.compare(model)
        for name, param in model.named_parameters():
            same = param.grad is not None and param.grad._local_tensor.data_ptr() == param.main_grad.data_ptr()
            expect(f"step {i}, {name}: .grad is over main_grad's memory", same, True)


@pytest.mark.parametrize("between", ["steps", "forward_and_backward"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
def test_zero_grad(set_to_none, between):
    run_ranks(zeroed, 2, set_to_none, between)


def one_step(rank: int, kwargs: dict[str, bool], want_reductions: int) -> None:
    model, twin, step = start(**kwargs)
    for i in range(2):
        x, x_twin = rows(rank, i).requires_grad_(), rows(rank, i).requires_grad_()
        with spy() as seen:
            loss(step(x)).backward()
        loss(twin(x_twin)).backward()
        twin.compare(model)
        expect("gradient of the input", torch.equal(x.grad, x_twin.grad), True)
        expect("reductions", len(reductions(seen)), want_reductions)


@pytest.mark.parametrize(
    "kwargs",
    [{"twice": True}, {"checkpointed": True}, {"twice": True, "checkpointed": True}],
    ids=["used_twice", "checkpointed", "checkpointed_and_used_twice"],
)
def test_one_reduction_per_weight(kwargs):
    run_ranks(one_step, 2, kwargs, 2)


class Grouped(nn.Module):
    """Experts around a dense layer; of the selectively checkpointed forward only the GEMMs are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 16, 16) * 0.3)
        self.dense = nn.Linear(16, 16, bias=False)
        self.contexts: Any = None

    def block(self, x: Tensor) -> Tensor:
        y = torch._grouped_mm(torch.relu(x), self.experts.mT, offs=ends_of(5, 0, len(x) - 5))
        return x + torch.relu(self.dense(torch.relu(y)))

    def forward(self, x: Tensor) -> Tensor:
        if self.contexts is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=self.contexts)


_SAVED = (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)


def save_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(rank: int) -> None:
    grads = {}
    for contexts in (None, functools.partial(create_selective_checkpoint_contexts, save_gemms)):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = sharded(Grouped(), shard_fn=lambda fqn, module, param: Shard(param.ndim - 2))
        model.contexts = contexts
        step = compiled(model, strict=True)
        for i in range(2):
            with spy() as seen:
                loss(step(rows(rank, i))).backward()
            expect("reductions", [(c.kind, c.dtype) for c in reductions(seen)], [("reduce_scatter", FP32)] * 2)
        # One a weight in forward; in backward the dense one's, whose input has a gradient.
        expect("gathers", len([c for c in seen if c.kind == "all_gather"]), 3)
        grads[contexts is None] = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        found = gtp_compile.verify(model, loss, options={"inner": "eager"})(rows(rank, 7))
        expect("errors of at most 1e-6", [g.leader for g in found.groups if not (g.error or 0) <= 1e-6], [])
    for name, plain in grads[True].items():
        expect(f"{name}: as without checkpointing, to the bit", torch.equal(plain, grads[False][name]), True)


def test_selective_checkpointing_that_saves_gemms():
    run_ranks(selectively, 2)


def pipelined(rank: int) -> None:
    """1F1B with two model chunks (virtual stages) on this rank: warm-up forwards, then one of each, then the rest."""
    torch.manual_seed(1)
    chunks = [Mlp(), Mlp(twice=True)]
    twins = [Twin(chunk) for chunk in chunks]
    steps = [compiled(sharded(chunk)) for chunk in chunks]
    # What, chunk, microbatch.
    schedule = ["F00", "F01", "F10", "B10", "F02", "F11", "B00", "B11", "F12", "B01", "B12", "B02"]
    waiting: dict[str, tuple[Tensor, Tensor]] = {}
    with spy() as seen:
        for what, chunk, batch in schedule:
            if what == "F":
                x = rows(rank, 3 * int(chunk) + int(batch)).requires_grad_()
                waiting[chunk + batch] = (x, loss(steps[int(chunk)](x)))
            else:
                x, value = waiting.pop(chunk + batch)
                value.backward()
                x_twin = x.detach().clone().requires_grad_()
                loss(twins[int(chunk)](x_twin)).backward()
                expect(f"{chunk}{batch}: gradient of the input", torch.equal(x.grad, x_twin.grad), True)
    expect("reductions", len(reductions(seen)), 2 * 2 * 3)
    for chunk, twin in zip(chunks, twins, strict=True):
        twin.compare(chunk)


def test_pipeline_order_with_two_chunks():
    run_ranks(pipelined, 2)


def cloned(rank: int) -> None:
    model, twin, step = start()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        losses = [loss(step(rows(rank, i))) for i in range(2)]
        for value in losses:
            value.backward()
    for i in range(2):
        loss(twin(rows(rank, i))).backward()
    twin.compare(model)


def test_saved_tensor_hooks_that_copy():
    run_ranks(cloned, 2)


def evaluated(rank: int) -> None:
    model, twin, step = start()
    for i in range(2):
        loss(step(rows(rank, i))).backward()
        loss(twin(rows(rank, i))).backward()
        for run in (step, model):
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    got, want = run(rows(rank, 7)), twin(rows(rank, 7))
                expect(f"evaluation under {context.__name__} equals the twin", torch.equal(got, want), True)
        twin.compare(model)


def test_evaluation_between_steps():
    """Compiled and eager, the same numbers as the twin, and the gradients stay as they are."""
    run_ranks(evaluated, 2)


def strided(rank: int) -> None:
    model, twin, step = start()
    # dy comes as a transpose, then as an expanded scalar.
    for make in (lambda y: (y.t().contiguous().t() * torch.arange(16)).t().sum(1).sum(), lambda y: y.sum()):
        make(step(rows(rank, 0))).backward()
        make(twin(rows(rank, 0))).backward()
        y, y_twin = step(rows(rank, 1)), twin(rows(rank, 1))
        dy = torch.randn(16, 12, generator=torch.Generator().manual_seed(rank)).to(BF16).t()
        y.backward(dy)
        y_twin.backward(dy)
        twin.compare(model)


def test_noncontiguous_grad_output():
    run_ranks(strided, 2)


def grad_of_grad(rank: int) -> str:
    _, _, step = start()
    x = rows(rank, 0).requires_grad_()
    try:
        (dx,) = torch.autograd.grad(loss(step(x)), x, create_graph=True)
        dx.float().pow(2).sum().backward()
    except RuntimeError as reason:
        return str(reason)
    return ""


def test_create_graph_is_a_clear_error():
    for message in run_ranks(grad_of_grad, 2):
        assert "double backward" in message
