"""Experts through batched GEMMs, on two ranks: capacity factor, a weight picked for each row, broadcast weights.

Every layer is linear in its weight, so its exact gradient is that of the same code in float64. All of them stand in one
model: they cost one compilation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dist_helpers import BF16, FP32, close, close_main_grad, compiled, expect, reduced, reductions, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import gtp_compile

E, N, K = 3, 10, 6


@dataclass(frozen=True)
class Layer:
    """`compute(weight, bias, x, ids)`; `weight` and `x` are shapes, in which C and S stand for this rank's counts."""

    name: str
    form: str
    weight: tuple[int, ...]
    x: tuple[Any, ...]
    compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    bias: tuple[int, ...] = ()
    id_range: tuple[int, int] = (0, E)

    def inputs(self, counts: dict[str, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn([counts.get(s, s) for s in self.x], generator=generator).to(BF16)
        return x, torch.randint(*self.id_range, (counts["S"],), generator=generator)


def column(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)


LAYERS = (
    Layer("bmm", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.bmm(x, w)),
    Layer("bmm_out_first", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.bmm(x, w.mT)),
    Layer("bmm_weight_left", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.bmm(w, x.mT)),
    Layer("baddbmm", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.baddbmm(b, x, w), (E, 1, N)),
    Layer("einsum", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.einsum("ecd,edf->ecf", x, w)),
    Layer("einsum_out_first", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.einsum("ecd,efd->ecf", x, w)),
    Layer("einsum_groups", "bmm", (E, K, N), (2, E, "C", K), lambda w, b, x, i: torch.einsum("gecd,edf->gecf", x, w)),
    Layer("matmul_groups", "batch_sum", (E, K, N), (2, E, "C", K), lambda w, b, x, i: x @ w),
    Layer("picked", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x)),
    Layer(
        "picked_out_last", "picked", (E, K, N), ("S", K), lambda w, b, x, i: torch.bmm(x.unsqueeze(1), w[i]).squeeze(1)
    ),
    Layer("picked_bias", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x) + b[i], (E, N)),
    Layer("picked_from_the_end", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x), id_range=(-E, E)),
    Layer("picked_few", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x), id_range=(1, 2)),
    Layer(
        "picked_sentinel",
        "picked",
        (E, N, K),
        ("S", K),
        lambda w, b, x, i: column(w, i.clamp(0, E - 1), x) * (i < E).to(x.dtype).unsqueeze(-1),
        id_range=(0, E + 2),
    ),
    Layer(
        "picked_select", "picked", (E, N, K), ("S", K), lambda w, b, x, i: (w.index_select(0, i) @ x[..., None])[..., 0]
    ),
    Layer("picked_einsum", "picked", (E, N, K), ("S", K), lambda w, b, x, i: torch.einsum("sk,snk->sn", x, w[i])),
    Layer("picked_several_rows", "picked", (E, K, N), ("S", 4, K), lambda w, b, x, i: torch.bmm(x, w[i])),
    Layer("broadcast", "batch_sum", (N, K), (4, "C", K), lambda w, b, x, i: torch.bmm(x, w.t().expand(4, -1, -1))),
    Layer("broadcast_4d", "batch_sum", (1, 2, K, N), (4, 2, "C", K), lambda w, b, x, i: x @ w.expand(4, -1, -1, -1)),
)


class Unit(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.randn(layer.weight) * 0.3)
        self.bias = nn.Parameter(torch.randn(layer.bias)) if layer.bias else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer.compute(self.weight, self.bias, x, ids)


class Model(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.units = nn.ModuleDict({layer.name: Unit(layer) for layer in LAYERS if layer.name in names})

    def forward(self, inputs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {name: unit(*inputs[name]) for name, unit in self.units.items()}


def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    return Shard(param.ndim - 2) if fqn.endswith("weight") else Replicate()


def train(
    rank: int, inner: str, names: tuple[str, ...], steps: list[list[dict[str, int]]]
) -> tuple[int, dict[str, tuple[str, bool, float]]]:
    """Some steps with these counts of each rank: how many graphs they cost, and what `verify` says of every weight."""
    torch.manual_seed(1)
    model = gtp_compile.shard(Model(names), world_mesh(), shard_fn=place, param_dtype=BF16)
    step = compiled(model, inner=inner, strict=True)
    torch._dynamo.utils.counters.clear()
    generator = torch.Generator().manual_seed(rank)
    for of_ranks in steps:
        model.zero_grad()
        inputs = {name: unit.layer.inputs(of_ranks[rank], generator) for name, unit in model.units.items()}
        with spy() as seen:
            outputs = step(inputs)
            dys = {n: torch.randn(y.shape, generator=generator).to(BF16) for n, y in outputs.items()}
            torch.autograd.backward(list(outputs.values()), list(dys.values()))
        expect("reductions", len(reductions(seen)), len(list(model.parameters())))
        expect("their dtype", {c.dtype for c in reductions(seen)}, {FP32})
        for name, unit in model.units.items():
            check(unit, *inputs[name], dys[name])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = lambda y: sum(t.float().square().sum() for t in y.values())  # noqa: E731
    found = gtp_compile.verify(model, loss, options={"inner": inner})(inputs)
    return graphs, {r.leader: (r.form, r.matched, r.error) for r in found.groups}


def check(unit: Unit, x: Tensor, ids: Tensor, dy: Tensor) -> None:
    params = [p for p in (unit.weight, unit.bias) if p is not None]
    exact = [torch.zeros(p.shape, dtype=torch.float64, requires_grad=True) for p in params]
    y = unit.layer.compute(exact[0], exact[-1], x.double(), ids)
    for param, want in zip(params, torch.autograd.grad(y, exact, dy.double()), strict=True):
        close_main_grad(param, reduced(want))


# step, rank
COUNTS = [
    [{"C": 5, "S": 9}, {"C": 5, "S": 9}],
    [{"C": 7, "S": 4}, {"C": 3, "S": 20}],
    [{"C": 4, "S": 6}, {"C": 9, "S": 5}],
]


ALL = tuple(layer.name for layer in LAYERS)
SOME = ("bmm", "einsum_groups", "matmul_groups", "picked", "picked_out_last", "broadcast")


@pytest.mark.parametrize(
    ("inner", "names"),
    [("eager", ALL[:8]), ("eager", ALL[8:]), pytest.param("inductor", SOME, marks=pytest.mark.slow)],
    ids=["eager_capacity", "eager_picked_broadcast", "inductor"],
)
def test_every_layer_is_exact_and_says_its_form(inner, names, subtests):
    for graphs, rows in run_ranks(train, 2, inner, names, COUNTS, timeout=600):
        assert graphs <= 2  # other counts of rows compile at most once more
        for layer in LAYERS:
            if layer.name in names:
                with subtests.test(layer.name):
                    form, matched, error = rows[f"units.{layer.name}.weight"]
                    assert (form, matched) == (layer.form, True)
                    assert error <= 1e-6


def hugging_face(rank: int) -> list[tuple[str, str, bool, float]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=40, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, use_cache=False, experts_implementation="batched_mm",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    twin = Qwen3MoeForCausalLM(config)
    twin.load_state_dict(model.state_dict())
    gtp_compile.shard(model, world_mesh())
    ids = torch.randint(0, 96, (2, 9 + rank), generator=torch.Generator().manual_seed(rank))
    compiled(model)(input_ids=ids, labels=ids).loss.backward()
    twin(input_ids=ids, labels=ids).loss.backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        close(name, param.grad.full_tensor(), reduced(other.grad), 1e-5)
    model.zero_grad()
    found = gtp_compile.verify(model, options={"inner": "eager"})(input_ids=ids, labels=ids)
    return [(r.leader, r.form, r.matched, r.error) for r in found.groups]


def test_hugging_faces_batched_mm_matches_its_twin():
    pytest.importorskip("transformers")
    for rows in run_ranks(hugging_face, 2):
        experts = [r for r in rows if ".experts." in r[0]]
        assert [(form, matched) for _, form, matched, _ in experts] == [("picked", True)] * 4
        assert max(error for *_, error in rows) <= 1e-6
