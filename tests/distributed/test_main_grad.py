"""main_grad attached, replaced, retyped or taken away between two steps: the one that is there counts."""

from collections.abc import Callable

import pytest
import torch
from dist_helpers import (
    BF16,
    FP32,
    close,
    close_main_grad,
    compiled,
    double_leaf,
    expect,
    linear64,
    reduced,
    reductions,
    sharded,
    spy,
    whole,
)
from ranks import run_ranks
from torch import Tensor, nn


class Setup:
    """One linear layer, x bf16[8, 16] -> [8, 32], and its float64 twin."""

    def __init__(self, rank: int, **kwargs) -> None:
        torch.manual_seed(1)
        self.rank = rank
        self.model = nn.Linear(16, 32, bias=False)
        self.twin = double_leaf(self.model.weight)
        sharded(self.model, **kwargs)
        self.param = self.model.weight
        self.step = compiled(self.model)

    def train(self, i: int) -> set[torch.dtype]:
        """One forward and backward; the dtypes on the wire."""
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * i + self.rank)).to(BF16)
        with spy() as seen:
            self.step(x).float().pow(2).sum().backward()
        self.twin.grad = None
        linear64(x, self.twin).float().pow(2).sum().backward()
        return {c.dtype for c in reductions(seen)}

    @property
    def want(self) -> Tensor:
        """The gradient of the last step alone."""
        return reduced(self.twin.grad)

    def local(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.param.leaf.shape, dtype=dtype)


def attached_later(rank: int) -> None:
    s = Setup(rank, main_grad_dtype=None)
    expect("wire without main_grad", s.train(0), {BF16})
    close("own .grad", whole(s.param, s.param.grad), s.want, 2.0**-8)
    s.model.zero_grad()
    s.param.main_grad = s.local(FP32)
    expect("wire with main_grad", s.train(1), {FP32})
    close_main_grad(s.param, s.want)
    expect(".grad is over it", s.param.grad._local_tensor.data_ptr(), s.param.main_grad.data_ptr())


def replaced(rank: int) -> None:
    s = Setup(rank)
    s.train(0)
    first, before = s.param.main_grad, s.param.main_grad.clone()
    s.param.main_grad = s.local(FP32)
    s.train(1)
    close_main_grad(s.param, s.want)
    expect("the old main_grad is untouched", torch.equal(first, before), True)
    expect(".grad is over the new one", s.param.grad._local_tensor.data_ptr(), s.param.main_grad.data_ptr())


def retyped(rank: int) -> None:
    s = Setup(rank)
    s.train(0)
    first, before = s.param.main_grad, s.param.main_grad.clone()
    s.param.main_grad = s.local(BF16)
    expect("wire follows main_grad", s.train(1), {BF16})
    close_main_grad(s.param, s.want, 2.0**-7)
    expect("dtype of main_grad", s.param.main_grad.dtype, BF16)
    expect("the old main_grad is untouched", torch.equal(first, before), True)
    expect(".grad, which a float32 parameter can't have over bf16", s.param.grad, None)
    s.param.main_grad = s.local(FP32)
    expect("wire follows main_grad back", s.train(2), {FP32})
    close_main_grad(s.param, s.want)


def taken_away(rank: int) -> None:
    s = Setup(rank)
    s.train(0)
    first, before = s.param.main_grad, s.param.main_grad.clone()
    s.model.zero_grad()
    s.param.main_grad = None
    for i in (1, 2):
        expect("wire without main_grad", s.train(i), {BF16})
        close("own .grad", whole(s.param, s.param.grad), s.want, 2.0**-8)
        expect("the old main_grad is untouched", torch.equal(first, before), True)
        s.model.zero_grad()


def grad_of_the_user(rank: int) -> None:
    """A `.grad` that the user put in place of ours is what the next backward adds to."""
    s = Setup(rank)
    s.train(0)
    s.param.grad = torch.ones_like(s.param)
    s.train(1)
    close_main_grad(s.param, s.want + 1)
    expect(".grad is over main_grad", s.param.grad._local_tensor.data_ptr(), s.param.main_grad.data_ptr())


def megatron(rank: int) -> None:
    """bf16 shards, fp32 main_grad: `.grad` stays None; the trainer's optimizer, or the model, zeroes main_grad."""
    torch.manual_seed(1)
    model = nn.Linear(16, 32, bias=False, dtype=BF16)
    twin = double_leaf(model.weight)
    sharded(model, param_dtype=None)
    step = compiled(model)
    for i in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * i + rank)).to(BF16)
        step(x).float().pow(2).sum().backward()
        linear64(x, twin).float().pow(2).sum().backward()
        close_main_grad(model.weight, reduced(twin.grad))
        expect(".grad", model.weight.grad, None)
    for zero in (model.weight.main_grad.zero_, model.zero_grad):
        zero()
        twin.grad = None
        step(x).float().pow(2).sum().backward()
        linear64(x, twin).float().pow(2).sum().backward()
        close_main_grad(model.weight, reduced(twin.grad))


CASES: list[Callable[[int], None]] = [attached_later, replaced, retyped, taken_away, grad_of_the_user, megatron]


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_the_main_grad_that_is_there_counts(case):
    run_ranks(case, 2)


def refused(rank: int) -> str:
    s = Setup(rank)
    with pytest.raises(ValueError) as caught:
        s.param.main_grad = torch.zeros(32, 16)
    return str(caught.value)


def test_main_grad_of_another_shape_is_refused():
    for message in run_ranks(refused, 2):
        assert message == (
            "weight: main_grad has the local shape (16, 16), got (32, 16); give each rank's part, not the whole "
            "weight's"
        )
