"""Few rows, none, unused experts, rows that nobody may read: what becomes of gradients, and that nobody hangs."""

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
    grouped64,
    linear64,
    no_outstanding_work,
    reduced,
    reductions,
    sharded,
    spy,
    whole,
)
from ranks import run_ranks
from torch import Tensor, nn

from gtp_compile import GroupedLinear

EXPERTS = 3


class Model(nn.Module):
    """x bf16[R, 16] -> dense [R, 16] -> grouped [R, 8]."""

    def __init__(self, stacked: bool, bias: bool = False) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16, bias=False)
        self.experts = GroupedLinear(EXPERTS, 16, 8, bias=bias, single_grouped_weight=stacked)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.experts(self.dense(x), splits)


class Twin:
    def __init__(self, model: Model) -> None:
        self.dense = double_leaf(model.dense.weight)
        stacked = model.experts.single_grouped_weight
        weight = model.experts.weight if stacked else torch.stack([w for _, w in members(model)])
        self.experts = double_leaf(weight)

    def __call__(self, x: Tensor, splits: Tensor) -> Tensor:
        return grouped64(linear64(x, self.dense), self.experts, splits.tolist())

    def compare(self, model: Model) -> None:
        close_main_grad(model.dense.weight, reduced(self.dense.grad))
        want = reduced(self.experts.grad)
        if model.experts.single_grouped_weight:
            close_main_grad(model.experts.weight, want)
        else:
            for (_, param), part in zip(members(model), want, strict=True):
                close_main_grad(param, part)


def members(model: Model) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.experts.named_parameters() if n.startswith("weight")]


def start(stacked: bool, **kwargs: bool):
    torch.manual_seed(1)
    model = Model(stacked, **kwargs)
    twin = Twin(model)
    sharded(model)
    return model, twin, compiled(model)


def rows(rank: int, step: int, count: int) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).sum()


LAYOUTS = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "discrete"])


def uneven(rank: int, stacked: bool, splits: list[list[list[int]]]) -> list[list[str]]:
    """One step for each entry of `splits`, which holds every rank's splits."""
    model, twin, step = start(stacked)
    issued = []
    for i, of_ranks in enumerate(splits):
        mine = torch.tensor(of_ranks[rank])
        x, x_twin = (rows(rank, i, int(mine.sum())).requires_grad_() for _ in range(2))
        with spy() as seen:
            loss(step(x, mine)).backward()
        issued.append([repr(c) for c in seen])
        loss(twin(x_twin, mine)).backward()
        twin.compare(model)
        close("gradient of the input", x.grad, x_twin.grad, 2.0**-7)
    no_outstanding_work()
    return issued


NOBODY, SEVEN, NINE = [0, 0, 0], [3, 0, 4], [2, 3, 4]
STEPS = {
    "no_tokens_from_the_start": [[SEVEN, NOBODY], [NINE, NOBODY]],
    "no_tokens_later": [[SEVEN, NINE], [SEVEN, NOBODY], [NOBODY, SEVEN], [NINE, SEVEN]],
    "no_tokens_anywhere": [[NOBODY, NOBODY], [NOBODY, NOBODY]],
    "seven_and_nine_alternating": [[SEVEN, NINE], [NINE, SEVEN], [SEVEN, NINE], [NINE, SEVEN]],
    "one_token": [[[0, 1, 0], SEVEN], [SEVEN, [0, 0, 1]]],
}


@LAYOUTS
@pytest.mark.parametrize("case", STEPS)
def test_ranks_with_other_token_counts(case, stacked):
    """Right gradients, nobody hangs, and all ranks issue the same collectives in the same order, every step."""
    first, second = run_ranks(uneven, 2, stacked, STEPS[case], timeout=90.0)
    assert first == second
    assert all(step == first[0] for step in first)


def empty_expert(rank: int, stacked: bool) -> None:
    model, _, step = start(stacked)
    for _, param in members(model):
        param.main_grad.normal_()
    before = [param.main_grad.clone() for _, param in members(model)]
    splits = torch.tensor([5, 0, 4])
    for fresh in (False, True):
        if fresh:
            model.zero_grad()
        loss(step(rows(rank, 0, 9), splits)).backward()
        for e in range(EXPERTS):
            now, old = (
                (members(model)[0][1].main_grad[e], before[0][e])
                if stacked
                else (members(model)[e][1].main_grad, before[e])
            )
            expect(f"expert {e}: any gradient", bool((now != (0 if fresh else old)).any()), e != 1)


@LAYOUTS
def test_expert_without_rows(stacked):
    """Exactly zero in a fresh main_grad; bitwise untouched in one that accumulates."""
    run_ranks(empty_expert, 2, stacked)


def poisoned(rank: int, stacked: bool, bias: bool) -> None:
    torch.manual_seed(1)
    model = GroupedLinear(EXPERTS, 16, 8, bias=bias, single_grouped_weight=stacked)
    weight = model.weight if stacked else torch.stack([p for n, p in model.named_parameters() if "weight" in n])
    twin = double_leaf(weight)
    biases = [double_leaf(p) for n, p in model.named_parameters() if "bias" in n]
    sharded(model)
    step = compiled(model)
    splits = torch.tensor([5, 0, 3])
    for i in range(2):
        x = rows(rank, i, 12)
        x[8:] = float("nan")
        x.requires_grad_()
        y = step(x, splits)
        expect("rows past the last offset of the output are zero", bool((y[8:] == 0).all()), True)
        dy = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank)).to(BF16)
        dy[8:] = float("nan")
        y.backward(dy)
        expect("rows past the last offset of dx are zero", bool((x.grad[8:] == 0).all()), True)
        grouped64(x.detach()[:8], twin, splits.tolist()).backward(dy[:8])
        for e, (part, b) in enumerate(zip(dy[:8].split(splits.tolist()), biases, strict=False)):
            b.grad = part.double().sum(0) + (0 if i == 0 else b.grad)
            want = reduced(b.grad)
            close_main_grad(getattr(model, f"bias{e}"), want)
        want = reduced(twin.grad)
        if stacked:
            close_main_grad(model.weight, want)
        else:
            for e in range(EXPERTS):
                close_main_grad(getattr(model, f"weight{e}"), want[e])


@LAYOUTS
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_poisoned_rows_past_the_last_offset(stacked, bias):
    """NaN in the rows of x and dy that belong to no expert, over two backwards."""
    run_ranks(poisoned, 2, stacked, bias)


def frozen(rank: int, names: list[str]) -> dict[str, int]:
    model, twin, step = start(stacked=False)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    splits = torch.tensor([3, 2, 4])
    with spy() as seen:
        for i in range(2):
            loss(step(rows(rank, i, 9), splits)).backward()
            loss(twin(rows(rank, i, 9), splits)).backward()
    want = {"dense.weight": reduced(twin.dense.grad)}
    want |= {f"experts.weight{e}": part for e, part in enumerate(reduced(twin.experts.grad))}
    for name, param in model.named_parameters():
        if name in names:
            expect(f"{name}: main_grad", bool(param.main_grad.any()), False)
            expect(f"{name}: .grad", param.grad, None)
        else:
            close_main_grad(param, want[name])
    expect("dtypes on the wire", {c.dtype for c in reductions(seen)} <= {FP32}, True)
    return {"reductions": len(reductions(seen)) // 2, "elements": sum(c.numel for c in reductions(seen)) // 2}


DENSE, MEMBER = 16 * 16, 16 * 8


@pytest.mark.parametrize(
    ("names", "count", "elements"),
    [
        (["dense.weight"], 1, 3 * MEMBER),
        (["experts.weight1"], 2, DENSE + 2 * MEMBER),
        (["experts.weight0"], 2, DENSE + 2 * MEMBER),
        (["experts.weight0", "experts.weight1", "experts.weight2"], 1, DENSE),
    ],
    ids=["dense", "follower", "leader", "whole_group"],
)
def test_frozen_weights_cost_nothing(names, count, elements):
    """No gradient, no collective; a group whose leader is frozen still reduces in the leader's dtype."""
    for got in run_ranks(frozen, 2, names):
        assert got == {"reductions": count, "elements": elements}


def thawed(rank: int) -> None:
    model, twin, step = start(stacked=True)
    splits = torch.tensor([3, 2, 4])
    for i, trains in enumerate([False, True, False]):
        model.zero_grad()
        twin.dense.grad = twin.experts.grad = None
        model.dense.weight.requires_grad_(trains)
        loss(step(rows(rank, i, 9), splits)).backward()
        loss(twin(rows(rank, i, 9), splits)).backward()
        close_main_grad(model.experts.weight, reduced(twin.experts.grad))
        if trains:
            close_main_grad(model.dense.weight, reduced(twin.dense.grad))
        else:
            expect("frozen: .grad", model.dense.weight.grad, None)
    expect("full weight", torch.equal(whole(model.dense.weight, model.dense.weight), twin.dense), True)


def test_freezing_between_steps():
    run_ranks(thawed, 2)


class Loop(nn.Module):
    """Experts that are modules, each on the rows that a list of numbers gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        parts = self.dense(x).split(splits)
        return torch.cat([expert(part) for part, expert in zip(parts, self.experts, strict=True)])


def loop(rank: int, splits: list[list[int]]) -> None:
    model = Loop()
    dense = double_leaf(model.dense.weight)
    experts = [double_leaf(expert.weight) for expert in model.experts]
    step = compiled(sharded(model))
    x = torch.randn(sum(splits[rank]), 16, generator=torch.Generator().manual_seed(rank)).to(BF16)
    with spy() as seen:
        y = step(x, splits[rank])
        y.sum().backward()
    for part, weight in zip(linear64(x, dense).split(splits[rank]), experts, strict=True):
        linear64(part, weight).sum().backward(retain_graph=True)
    expect("gathers", sum(c.kind == "all_gather" for c in seen), 1 + 2 * EXPERTS)
    sums = [c for c in reductions(seen) if c.dtype == FP32]  # the ranks' vote on the loop is one, too
    expect("reductions", len(sums), 1 + EXPERTS)
    close_main_grad(model.dense.weight, reduced(dense.grad))
    for expert, weight in zip(model.experts, experts, strict=True):
        close_main_grad(expert.weight, reduced(weight.grad))


@pytest.mark.parametrize("splits", [[[4, 0, 4], [3, 2, 2]], [[0, 0, 0], [0, 5, 1]]], ids=["some", "none"])
def test_an_expert_that_is_known_to_be_empty_costs_the_same_collectives(splits):
    """Inductor's `cat` drops empty parts while it is traced, and what led to them: one rank would gather less."""
    run_ranks(loop, 2, splits)
