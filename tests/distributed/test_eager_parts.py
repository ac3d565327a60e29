"""Weights whose GEMMs are in no compiled graph, or in several: nothing is lost, and what is rounded is rounded once."""

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import (
    BF16,
    FP32,
    close_main_grad,
    compiled,
    expect,
    no_outstanding_work,
    reduced,
    reductions,
    sharded,
    spy,
)
from ranks import run_ranks
from torch import Tensor, nn
from uneven import Warned


class Parts(nn.Module):
    """An embedding, a norm and two linear layers over tokens; the hooks are where a test puts its obstacle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.middle(torch.relu(self.up(self.norm(self.embed(tokens))))))


class EagerEmbedding(Parts):
    @torch._dynamo.disable
    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class GraphBreak(Parts):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 1.0


class EagerUp(Parts):
    @torch._dynamo.disable
    def middle(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.norm(x.unflatten(1, (2, 16)).sum(1))))


class WeightAcrossBreak(Parts):
    """The weight is gathered in one graph and used in the next: its GEMM is in another graph than its anchor."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.down.weight
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        return F.linear(torch.relu(self.up(self.norm(x))), weight)


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(20, (12,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def gradients(twin: nn.Module, rank: int, steps: int) -> dict[str, Tensor]:
    """Stock autograd in bf16 on this rank's tokens (each step rounded by itself), averaged over ranks in float64."""
    total: dict[str, Tensor] = {}
    for i in range(steps):
        twin.zero_grad()
        loss(twin(tokens(rank, i))).backward()
        for name, param in twin.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + param.grad.double()
    return {name: reduced(g) for name, g in total.items()}


def start(make: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = make()
    twin = make().to(BF16)
    twin.load_state_dict(model.state_dict())
    return sharded(model), twin


# Stock bf16 autograd rounds each gradient once, by at most 2^-9 of each entry; summing in float32 adds nothing to that.
ROUNDED_ONCE = 2.0**-8


def trained(rank: int, make: type[nn.Module], fullgraph: bool, in_eager: list[str]) -> list[str]:
    with Warned() as warned:
        model, twin = start(make)
        step = compiled(model, fullgraph=fullgraph)
        with spy() as seen:
            for i in range(2):
                loss(step(tokens(rank, i))).backward()
        want = gradients(twin, rank, 2)
        for name, param in model.named_parameters():
            # What is computed in eager is rounded as the twin's is: then only the order of fp32 sums differs.
            close_main_grad(param, want[name], 1e-6 if name in in_eager else ROUNDED_ONCE)
            expect(
                f"{name}: gradients that arrived outside compiled graphs", param.leaf.eager_uses, 2 * (name in in_eager)
            )
        expect("dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
        expect("reductions", len(reductions(seen)), 2 * len(want))
        no_outstanding_work()
    return warned


CASES = {
    "whole_graph": (Parts, True, []),
    "graph_break": (GraphBreak, False, []),
    "embedding_in_eager": (EagerEmbedding, False, ["embedding.weight"]),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_in_eager(case):
    # Embeddings and norms are reductions: rounded silently, listed by explain.
    run_ranks(trained, 2, *CASES[case])


def test_a_linear_layer_in_eager_warns_with_its_name():
    names = ["norm.weight", "up.weight", "up.bias"]
    for warned in run_ranks(eager_linear, 2, names):
        assert any("up.weight" in text and "rounded" in text for text in warned), warned
        assert sum("up.weight" in text for text in warned) == 1, warned


def eager_linear(rank: int, names: list[str]) -> list[str]:
    return trained(rank, EagerTwice, False, names)


class EagerTwice(EagerUp):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.down(self.middle(torch.cat([x, x], 1)))


def test_a_weight_gathered_before_a_graph_break_warns_with_its_name():
    for warned in run_ranks(across_break, 2):
        assert sum("down.weight" in text and "rounded" in text for text in warned) == 1, warned


def across_break(rank: int) -> list[str]:
    return trained(rank, WeightAcrossBreak, False, [])


def never_compiled(rank: int, set_to_none: bool) -> None:
    model, twin = start(Parts)
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        values = [loss(model(tokens(rank, i))) for i in range(2)]
        for value in values:
            value.backward()
        want = gradients(twin, rank, 2)
        for name, param in model.named_parameters():
            close_main_grad(param, want[name])
            expect(f"{name}: .grad is main_grad", param.grad._local_tensor.data_ptr(), param.main_grad.data_ptr())


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
def test_a_model_that_is_never_compiled(set_to_none):
    run_ranks(never_compiled, 2, set_to_none)
