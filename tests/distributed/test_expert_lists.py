"""Experts that are modules in a list: which lists those are, what is captured, and what is refused."""

import copy
import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from dist_helpers import BF16, FP32, close_main_grad, compiled, double_leaf, expect, linear64, reduced, sharded, spy
from ranks import run_ranks
from torch import Tensor, nn
from uneven import Warned, loss, message

import gtp_compile
from gtp_compile import eager_forward, is_expert_list, testing

E, H = 4, 16


class Expert(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H, bias=False)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Experts(nn.ModuleList):
    pass


LISTS: dict[str, tuple[str, nn.Module, bool]] = {
    "its name": ("layers.0.mlp.experts", nn.ModuleList([nn.Linear(2, 2)]), True),
    "its class": ("mlp", Experts([nn.Linear(2, 2)]), True),
    "its members' class": ("ffns", nn.ModuleDict({"a": Expert(), "b": Expert()}), True),
    "layers": ("layers", nn.ModuleList([nn.Linear(2, 2)]), False),
    "layers with experts, by class": ("layers", nn.ModuleList([MixtureOfExperts()]), False),
    "layers with experts, by name": ("expert_layers", nn.ModuleList([MixtureOfExperts()]), False),
    "below an expert": ("experts.0.layers", nn.ModuleList([nn.Linear(2, 2)]), False),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_of_experts_is_known_by_its_names(case):
    fqn, module, want = LISTS[case]
    assert is_expert_list(fqn, module) == want


class Static(nn.Module):
    """Calls every expert with the rows that it gets, none included."""

    def __init__(self, attribute: str = "experts") -> None:
        super().__init__()
        setattr(self, attribute, nn.ModuleList(Expert() for _ in range(E)))
        self.attribute = attribute

    def forward(self, x: Tensor, splits: list[int] | Tensor) -> Tensor:
        sizes = splits if isinstance(splits, list) else splits.tolist()
        return self.loop(x, sizes)

    def loop(self, x: Tensor, sizes: list[int]) -> Tensor:
        experts = getattr(self, self.attribute)
        return torch.cat([expert(rows) for expert, rows in zip(experts, x.split(sizes), strict=True)])


class Sparing(Static):
    """Leaves out those without rows: not the same on all ranks."""

    def loop(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = zip(getattr(self, self.attribute), x.split(sizes), strict=True)
        return torch.cat([expert(rows) for expert, rows in parts if len(rows) > 0])


def exact(w: dict[str, Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    parts = zip(w.values(), x.split(sizes), strict=True)
    return torch.cat([linear64(rows, weight) for weight, rows in parts])


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, H, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


BUSY = ([2, 3, 1, 2], [4, 1, 2, 1])
SIZES = ([2, 3, 1, 2], [0, 8, 0, 0])  # on one rank every expert has rows, on the other one has


def trained(
    rank: int, kind: type[Static], attribute: str, by_rank: Any, is_compiled: bool, as_tensor: bool, **kwargs: Any
) -> str:
    """Gradients of two steps against the exact ones; "captured", or the warning of a loop in eager."""
    eager_forward._warn.cache_clear()
    torch.manual_seed(1)
    model, sizes = kind(attribute), by_rank[rank]
    w = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model, **kwargs)
    run = compiled(model, fullgraph=False) if is_compiled else model
    with Warned() as texts:
        for step in range(2):
            x = rows(rank, step)
            loss(run(x, torch.tensor(sizes) if as_tensor else sizes)).backward()
            loss(exact(w, x, sizes)).backward()
    for name, param in model.named_parameters():
        close_main_grad(param, reduced(w[name].grad))
    return "".join(texts) or "captured"


@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tolist"])
@pytest.mark.parametrize("sizes", [BUSY, SIZES], ids=["busy", "some idle"])
@pytest.mark.works("a compiled loop over every expert of a `ModuleList`", "captured, also behind a graph break")
def test_a_loop_over_every_expert_is_captured(as_tensor, sizes):
    assert run_ranks(trained, 2, Static, "experts", sizes, True, as_tensor) == ["captured"] * 2


@pytest.mark.works("one behind a graph break that skips experts without rows", "as in eager, on all ranks")
def test_a_graph_with_all_experts_runs_in_eager_where_another_rank_has_not_all():
    for told in run_ranks(trained, 2, Sparing, "experts", SIZES, True, True):
        assert "Sparing: runs outside compiled graphs" in told


class Shared(nn.Module):
    """A shared expert behind the loop over those that were hit; or a second output, with a constant where none was."""

    def __init__(self, has_shared: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.shared_mlp = Expert() if has_shared else None

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            rows = (chosen == e).nonzero().flatten()
            y = y.index_add(0, rows, self.experts[e](x[rows]))
        return (x.float().mean(), y) if self.shared_mlp is None else y + self.shared_mlp(x)

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        parts = [linear64(x * (chosen == e).unsqueeze(1), w[f"experts.{e}.weight"]) for e in range(E)]
        return sum(parts) if self.shared_mlp is None else sum(parts) + linear64(x, w["shared_mlp.weight"])


def beside(rank: int, has_shared: bool, is_compiled: bool) -> list[str]:
    torch.manual_seed(1)
    model = Shared(has_shared)
    w = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model, param_dtype=FP32)  # a shared expert's GEMM in eager would round to bf16 first
    run = compiled(model, fullgraph=False) if is_compiled else model
    x, chosen = rows(rank).float(), torch.tensor([[0, 1, 1, 3, 0, 0, 0, 0], []][rank], dtype=torch.int64)
    with spy() as seen:
        output = run(x, chosen)
        (output if has_shared else output[1]).sum().backward()
    model.exact(w, x, chosen if len(chosen) else torch.full((8,), E)).sum().backward()
    for name, param in model.named_parameters():
        close_main_grad(param, reduced(w[name].grad))
    return [repr(c) for c in seen]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("has_shared", [True, False], ids=["a shared expert behind", "a second output"])
def test_a_rank_without_hits_keeps_up_with_what_is_beside_the_loop(has_shared, is_compiled):
    first, second = run_ranks(beside, 2, has_shared, is_compiled)
    assert first == second


def every_list(fqn: str, module: nn.Module) -> bool:
    return True


def by_hand(rank: int) -> str:
    return trained(rank, Sparing, "branches", SIZES, False, False, experts_fn=every_list)


def test_a_list_of_another_name():
    for told in run_ranks(by_hand, 2):
        assert "Sparing: runs outside compiled graphs" in told


def alone(rank: int, is_compiled: bool) -> str:
    """The loop is in no `forward` above the list, so other ranks' experts are waited for, a second here."""
    torch.manual_seed(1)
    model = Static()
    sharded(model)
    first = model.experts[0].weight.leaf
    timeout, first.meeting.timeout = first.meeting.timeout, timedelta(seconds=1)
    call: Callable[..., Any] = compiled(model.experts[rank]) if is_compiled else model.experts[rank]
    try:
        return message(RuntimeError, lambda: call(rows(rank)))
    finally:
        first.meeting.timeout = timeout


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.works(
    "experts called without their list's owner, others on each rank", "refused after a minute, with names"
)
def test_experts_without_a_loop_are_waited_for(is_compiled):
    for rank, text in enumerate(run_ranks(alone, 2, is_compiled)):
        assert f"experts.{rank}.weight" in text and f"rank(s) [{1 - rank}] did not come" in text, text


def passed_on(rank: int) -> None:
    """Copies and files know their experts, and train."""
    torch.manual_seed(1)
    model = Sparing()
    w = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    x = rows(rank)
    loss(exact(w, x, SIZES[rank])).backward()
    for other in others:
        loss(other(x, SIZES[rank])).backward()
        for name, param in other.named_parameters():
            close_main_grad(param, reduced(torch.zeros_like(w[name]) if w[name].grad is None else w[name].grad))
            expect("still read by a forward", param.leaf.scope, None)


def test_copies_and_files():
    run_ranks(passed_on, 2)


def interleaved(rank: int) -> None:
    """Two forwards, then their backwards; and one without gradients between."""
    torch.manual_seed(1)
    model = Sparing()
    w = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model)
    losses = [loss(model(rows(rank, step), SIZES[(rank + step) % 2])) for step in range(2)]
    with spy() as seen, torch.no_grad():
        expect("values", torch.equal(model(rows(rank), SIZES[rank]), exact(w, rows(rank), SIZES[rank])), True)
    expect("without gradients", [c.kind for c in seen], ["all_reduce", "all_gather"])  # the vote, and all experts
    for value in losses:
        value.backward()
    for step in range(2):
        loss(exact(w, rows(rank, step), SIZES[(rank + step) % 2])).backward()
    for name, param in model.named_parameters():
        close_main_grad(param, reduced(w[name].grad))


def test_forwards_before_their_backwards():
    run_ranks(interleaved, 2)


def test_explain():
    with testing.fake_mesh(2) as mesh:
        model = gtp_compile.shard(Sparing(), mesh, param_dtype=BF16)
        report = gtp_compile.explain(model)(torch.zeros(8, H, dtype=BF16), [0, 8, 0, 0])
    assert [row.kind for row in report.others] == ["eager"] * E
