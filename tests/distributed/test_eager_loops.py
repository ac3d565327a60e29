"""Experts in a Python loop over those that a batch hits: in eager, with other reads on every rank."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from torch.utils.checkpoint import checkpoint
from uneven import Warned, loss

import gtp_compile
from gtp_compile import eager_forward

E, H, I = 4, 16, 24  # noqa: E741


def hit(chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The experts with a token, as scalar tensors, and the rows of each: Dynamo can't unroll a loop over them."""
    for e in chosen.unique():
        yield e, (chosen == e).nonzero().flatten()


class Loop(nn.Module):
    """As Hugging Face's eager experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) / 4)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            gate, up = F.linear(x[rows], self.gate_up_proj[e]).chunk(2, -1)
            out.index_add_(0, rows, F.linear(F.silu(gate) * up, self.down_proj[e]).to(x.dtype))
        return out

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            gate, up = linear64(x[rows], w["gate_up_proj"][e]).chunk(2, -1)
            out = out.index_add(0, rows, linear64(F.silu(gate) * up, w["down_proj"][e]))
        return out


class Transposed(nn.Module):
    """As gpt-oss's: [E, K, N], biases, gate and up interleaved; weights are taken before the loop."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * I) / 4)
        self.down_proj = nn.Parameter(torch.randn(E, I, H) / 4)
        self.down_bias = nn.Parameter(torch.randn(E, H) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out, weight = torch.zeros_like(x), self.gate_up_proj
        for e, rows in hit(chosen):
            y = x[rows] @ weight[e] + self.gate_up_bias[e]
            y = F.silu(y[:, ::2]) * y[:, 1::2]
            out.index_add_(0, rows, F.linear(y, self.down_proj[e].t(), self.down_bias[e]))
        return out

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            y = linear64(x[rows], w["gate_up_proj"][e].t(), None) + w["gate_up_bias"][e].to(x.dtype)
            y = F.silu(y[:, ::2]) * y[:, 1::2]
            out = out.index_add(0, rows, linear64(y, w["down_proj"][e].t(), w["down_bias"][e]))
        return out


class Checkpointed(nn.Module):
    """The experts' call is repeated in backward, as a checkpointed layer does it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Loop()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, chosen, use_reentrant=False)

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        return x + self.inner.exact({n.removeprefix("inner."): t for n, t in w.items()}, x, chosen)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def expert64(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = linear64(x, w[f"{name}.up.weight"], w[f"{name}.up.bias"])
    return linear64(F.silu(y), w[f"{name}.down.weight"])


class Listed(nn.Module):
    """As Mixtral's first code: the module with the router has the loop over experts that are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Expert() for _ in range(E))

    def call(self, expert: nn.Module, x: Tensor) -> Tensor:
        return expert(x)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out, scores = torch.zeros_like(x), self.gate(x)
        for e, rows in hit(chosen):
            out.index_add_(0, rows, self.call(self.experts[e], x[rows]) * scores[rows, e, None])
        return out

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        out, scores = torch.zeros_like(x), linear64(x, w["gate.weight"])
        for e, rows in hit(chosen):
            out = out.index_add(0, rows, expert64(w, f"experts.{e}", x[rows]) * scores[rows, e, None])
        return out


class EachCheckpointed(Listed):
    def call(self, expert: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(expert, x, use_reentrant=False)


class ListCheckpointed(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Listed()


class Keyed(nn.ModuleDict):
    """As Switch's: the list itself has the loop."""

    def __init__(self) -> None:
        super().__init__({f"expert_{e}": Expert() for e in range(E)})

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            out.index_add_(0, rows, self[f"expert_{e}"](x[rows]))
        return out

    def exact(self, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            out = out.index_add(0, rows, expert64(w, f"expert_{e}", x[rows]))
        return out


class Skipped(Listed):
    """Counts leave the graph, so Dynamo unrolls the loop behind the break over the experts that this rank hits."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order, scores = chosen.argsort(stable=True), self.gate(x)
        return self.loop(x, scores, order, chosen.bincount(minlength=E).tolist())

    def loop(self, x: Tensor, scores: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        parts = []
        for e, rows in enumerate(order.split(counts)):
            if len(rows) == 0:
                continue
            parts.append(self.call(self.experts[e], x[rows]) * scores[rows, e, None])
        return torch.cat(parts)[order.argsort()] if parts else torch.zeros_like(x)


class Block(nn.Module):
    """A layer before the experts, so that their input needs a gradient, and one behind them."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.experts, self.behind = nn.Linear(H, H, bias=False), experts(), nn.Linear(H, H, bias=False)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.behind(self.experts(self.before(x), chosen))


DIGITS = str.maketrans("", "", "0123456789")

EXPERTS = [Loop, Transposed, Checkpointed, Listed, Keyed, Skipped, EachCheckpointed, ListCheckpointed]
CHOICES = {
    "other experts": [[0, 1, 1, 3, 3, 0, 0, 1], [2, 2, 2, 2, 2, 2, 2, 2]],
    "no tokens on one rank": [[0, 1, 1, 3], []],
    "no tokens": [[], []],
}


def looped(rank: int, experts: type[Any], choices: list[list[int]], is_compiled: bool, whole_model: bool) -> list[str]:
    eager_forward._warn.cache_clear()
    torch.manual_seed(1)
    model = Block(experts) if whole_model else experts()
    exact = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model, shard_fn=functools.partial(gtp_compile.shard_large, min_numel=0))
    step = compiled(model, fullgraph=False) if is_compiled else model
    chosen = torch.tensor(choices[rank], dtype=torch.int64)
    told: list[str] = []
    for i in range(2):
        x = torch.randn(len(chosen), H, generator=torch.Generator().manual_seed(10 * i + rank)).to(BF16)
        with spy() as seen, Warned() as texts:
            loss(step(x, chosen)).backward()
        told += texts
        sums = [c for c in reductions(seen) if c.dtype.is_floating_point]  # not the vote on what is captured
        expect("dtypes of the sums", {c.dtype for c in sums}, {FP32})
        # Equal weights of the experts in a list go together.
        expect("one reduction a weight", len(sums), len({n.replace("expert_", "").translate(DIGITS) for n in exact}))
        want = loss(forward64(model, exact, x, chosen))
        if want.requires_grad:  # else nothing is used on this rank
            want.backward()
    for name, param in model.named_parameters():
        grad = exact[name].grad
        total = reduced(torch.zeros_like(exact[name]) if grad is None else grad)
        outside = name in ("before.weight", "behind.weight", "experts.gate.weight", "experts.inner.gate.weight")
        # With a loop in it, a forward that breaks the graph runs in eager from its beginning.
        is_captured = is_compiled and ("gate" not in name or experts is Skipped)
        by_autograd = name.endswith("gate_up_bias") or (outside and not is_captured)
        close_main_grad(param, total, 2.0**-7 if by_autograd else 1e-6)
    expect("ends alike on every rank", len(set(map(tuple, gathered(seen)))), 1)
    return [t for t in told if "outside compiled graphs" in t]


def gathered(seen: list[Any]) -> list[list[str]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [repr(c) for c in seen])
    return everyone


def forward64(model: Any, w: dict[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
    if not isinstance(model, Block):
        return model.exact(w, x, chosen)
    inner = {n.removeprefix("experts."): t for n, t in w.items()}
    y = model.experts.exact(inner, linear64(x, w["before.weight"]), chosen)
    return linear64(y, w["behind.weight"])


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.works(
    "a Python loop over the experts that a batch hits", "float32 wgrad and sum; one gather, one reduction; one warning"
)
def test_gradients_and_collectives_do_not_depend_on_what_is_hit(experts, choice, is_compiled):
    for told in run_ranks(looped, 2, experts, CHOICES[choice], is_compiled, True):
        assert len(told) == 1 and 'experts_implementation="grouped_mm"' in told[0], told


def test_the_experts_alone():
    """Their input needs no gradient, so only the tie leads backward to weights that a rank did not use."""
    run_ranks(looped, 2, Loop, CHOICES["no tokens on one rank"], True, False)


def without_gradients(rank: int) -> None:
    torch.manual_seed(1)
    model = Block(Loop)
    sharded(model, shard_fn=None)
    x, chosen = torch.randn(8, H).to(BF16), torch.tensor([[0, 1, 1, 3, 3, 0, 0, 1], [2] * 8][rank])
    with torch.no_grad():
        want = model(x, chosen)
        expect("compiled", torch.equal(compiled(model, fullgraph=False)(x, chosen), want), True)
        with gtp_compile.unsharded(model):
            expect("unsharded", torch.equal(model(x, chosen), want), True)


def test_without_gradients():
    run_ranks(without_gradients, 2)


class Odd(Loop):
    """Uses that no product of a whole row of weights is."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1.0 if self.gate_up_proj.dtype == x.dtype else 0.5  # the first read
        y = torch.einsum("rh,eih->rei", x, self.gate_up_proj).sum(1)
        out = y[:, :H] * scale
        for e, rows in hit(chosen):
            out = out.index_add(0, rows, F.linear(F.linear(x[rows], self.gate_up_proj[e, :I]), self.down_proj[e]))
        return out


def oddly(rank: int) -> list[str]:
    """Autograd's share and ours add up; what was rounded is said, with the name."""
    torch.manual_seed(1)
    model, twin = Odd(), Odd()
    twin.load_state_dict(model.state_dict())
    twin.double()
    sharded(model, shard_fn=None)
    x, chosen = torch.randn(8, H).to(BF16), torch.tensor([0, 1, 1, 3, 3, 0, 0, 1])
    with Warned() as texts:
        loss(model(x, chosen)).backward()
    loss(twin(x.double(), chosen)).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(param.leaf.fqn, whole(param, param.main_grad), reduced(other.grad), 2e-2)
    return [t.partition(":")[0] for t in texts if "was rounded" in t]


def test_other_operators_are_summed_too_and_said():
    assert run_ranks(oddly, 2) == [["gate_up_proj"]] * 2


@torch.compile(backend="aot_eager")
def ffn(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) * 2


class HandsOver(Loop):
    """A compiled function gets slices of the weights."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, rows in hit(chosen):
            gate, up = ffn(x[rows], self.gate_up_proj[e]).chunk(2, -1)
            out = out.index_add(0, rows, F.linear(F.silu(gate) * up, self.down_proj[e]))
        return out


def handed_over(rank: int) -> None:
    torch.manual_seed(1)
    model, twin = HandsOver(), HandsOver()
    twin.load_state_dict(model.state_dict())
    twin.double()
    sharded(model, shard_fn=None)
    chosen = torch.tensor([[0, 1, 1, 3, 3, 0, 0, 1], [2] * 8][rank])
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(rank)).to(BF16)
    loss(model(x, chosen)).backward()
    loss(twin(x.double(), chosen)).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(param.leaf.fqn, whole(param, param.main_grad), reduced(other.grad), 2e-2)


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="Dynamo of torch 2.11 raises a RecursionError")
def test_slices_handed_to_a_compiled_function():
    run_ranks(handed_over, 2)


def autocast(rank: int) -> None:
    torch.manual_seed(1)
    model, twin = Loop(), Loop()
    twin.load_state_dict(model.state_dict())
    sharded(model, shard_fn=None, param_dtype=FP32)
    x, chosen = torch.randn(8, H, requires_grad=True), torch.tensor([[0, 1, 1, 3, 3, 0, 0, 1], [2] * 8][rank])
    for m in (model, twin):
        with torch.autocast("cpu", BF16):
            loss(m(x, chosen)).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(param.leaf.fqn, whole(param, param.main_grad), reduced(other.grad), 2e-2)


def test_autocast():
    run_ranks(autocast, 2)


def convolved(rank: int) -> list[str]:
    """A convolution's weight has three dims, too, but no experts: nothing is said."""
    model = sharded(nn.Conv1d(4, 6, 3), shard_fn=None, param_dtype=FP32)
    with Warned() as texts:
        loss(model(torch.ones(2, 4, 8))).backward()
    expect("a gradient", bool(model.weight.main_grad.any()), True)
    return texts


def test_a_convolution_is_no_stack():
    assert run_ranks(convolved, 2) == [[], []]


def copied(rank: int) -> None:
    """The scope of a forward is no part of what is copied or saved."""
    model = sharded(Block(Loop), shard_fn=None)
    other = copy.deepcopy(model)
    x, chosen = torch.randn(4, H).to(BF16), torch.tensor([0, 1, 2, 3])
    expect("forward", torch.equal(other(x, chosen), model(x, chosen)), True)
    expect("class", type(other.experts) is type(model.experts), True)
    expect("left over", [p.leaf.scope for p in model.parameters()], [None] * len(list(model.parameters())))


def test_a_copy():
    run_ranks(copied, 2)
