"""Where compiled graphs meet the rest of autograd: views of inputs, written inputs, repeated and partial backwards."""

import pytest
import torch
from dist_helpers import (
    BF16,
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
from torch import Tensor, nn


class Views(nn.Module):
    """Returns a view of its input before a view of its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return x.view(-1, 16), y.view(-1, 16), y.t()


class Writes(nn.Module):
    """Adds to one of its inputs in place and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, out: Tensor) -> None:
        out.add_(self.linear(x))


def rows(rank: int, step: int, *shape: int) -> Tensor:
    shape = shape or (6, 16)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).sum()


def two_graphs(rank: int, kind: str) -> None:
    """A second graph behind a first one; gradients start from zero each step, which happens when backward arrives."""
    torch.manual_seed(1)
    models = nn.ModuleList([nn.Linear(16, 16, bias=False), Views() if kind == "views" else Writes()])
    twins = [double_leaf(p) for p in models.parameters()]
    sharded(models)
    first, second = (compiled(m) for m in models)
    for i in range(3):
        models.zero_grad()
        x, hidden = rows(rank, i), first(rows(rank, i))
        if kind == "views":
            same, y, _ = second(hidden)
            loss(same + y).backward()
        else:
            hidden = hidden * 1.0
            second(x, hidden)
            loss(hidden).backward()
        for twin in twins:
            twin.grad = None
        hidden = linear64(x, twins[0])
        loss(hidden + linear64(hidden if kind == "views" else x, twins[1])).backward()
        for param, twin in zip(models.parameters(), twins, strict=True):
            close_main_grad(param, reduced(twin.grad))


@pytest.mark.parametrize("kind", ["views", "writes"])
def test_outputs_that_are_views_or_written_inputs(kind):
    run_ranks(two_graphs, 2, kind)


def start(**kwargs: bool) -> tuple[nn.Linear, Tensor, nn.Module]:
    torch.manual_seed(1)
    model = nn.Linear(16, 32, bias=False)
    twin = double_leaf(model.weight)
    return sharded(model), twin, compiled(model)


def retained(rank: int) -> None:
    model, twin, step = start()
    value = loss(step(rows(rank, 0)))
    value.backward(retain_graph=True)
    value.backward()
    loss(linear64(rows(rank, 0), twin)).backward()
    close_main_grad(model.weight, 2 * reduced(twin.grad))


def test_backward_twice_through_one_graph():
    run_ranks(retained, 2)


def abandoned(rank: int) -> None:
    """A forward whose backward never comes leaves nothing behind."""
    model, twin, step = start()
    for i in range(2):
        step(rows(rank, 5))
        loss(step(rows(rank, i))).backward()
        loss(linear64(rows(rank, i), twin)).backward()
    close_main_grad(model.weight, reduced(twin.grad))


def test_forward_without_backward():
    run_ranks(abandoned, 2)


class Halves(nn.Module):
    """One weight in two slices, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight
        return x @ weight[:8].t(), x @ weight[8:].t()


def sliced(rank: int) -> None:
    torch.manual_seed(1)
    model = Halves()
    sharded(model)
    step = compiled(model)
    x, dy = rows(rank, 0), rows(rank, 1, 6, 32)
    want = reduced(dy.double().t() @ x.double())
    with spy() as seen:
        torch.autograd.backward(step(x), [dy[:, :8], dy[:, 8:]])
    expect("reductions", len(reductions(seen)), 1)
    close_main_grad(model.linear.weight, want)
    model.zero_grad()
    step(x)[0].backward(dy[:, :8])
    want[8:] = 0
    close_main_grad(model.linear.weight, want)


def test_slices_of_a_weight_and_outputs_without_gradient():
    run_ranks(sliced, 2)


def three_dimensions(rank: int) -> None:
    torch.manual_seed(1)
    model = nn.Linear(16, 32)
    sharded(model)
    x, dy = rows(rank, 0, 3, 5, 16), rows(rank, 1, 3, 5, 32)
    compiled(model)(x).backward(dy)
    close_main_grad(model.weight, reduced(dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)))
    close_main_grad(model.bias, reduced(dy.double().sum((0, 1))))


def test_batches_of_sequences():
    run_ranks(three_dimensions, 2)


def autocast(rank: int) -> None:
    """float32 weights, gathered as such, computed with in bf16 by autocast."""
    torch.manual_seed(1)
    model = nn.Linear(16, 32)
    sharded(model, param_dtype=None)
    step = compiled(model)
    x, dy = rows(rank, 0).float(), rows(rank, 1, 6, 32)
    with torch.autocast("cpu", BF16):
        y = step(x)
    expect("computed in", y.dtype, BF16)
    y.backward(dy)
    close_main_grad(model.weight, reduced(dy.double().t() @ x.double()))
    close_main_grad(model.bias, reduced(dy.double().sum(0)))


def test_autocast():
    run_ranks(autocast, 2)


def only_the_input(rank: int) -> bool:
    model, _, step = start()
    x = rows(rank, 0).requires_grad_()
    torch.autograd.grad(loss(step(x)), x)
    return bool(model.weight.main_grad.any())


def test_autograd_grad_of_the_input_leaves_main_grad_alone():
    assert run_ranks(only_the_input, 2) == [False, False]


def changed(rank: int) -> str:
    model, _, step = start()
    value = loss(step(rows(rank, 0).requires_grad_()))
    with torch.no_grad():
        model.weight.mul_(2)
    try:
        value.backward()
    except RuntimeError as reason:
        return str(reason)
    return ""


@pytest.mark.xfail(reason="backward gathers the new values: writes to a DTensor don't count as writes to its shard")
def test_weight_that_changes_between_forward_and_backward_is_an_error():
    """As in eager torch, where the saved weight's version is checked."""
    for message in run_ranks(changed, 2):
        assert "modified by an inplace operation" in message
