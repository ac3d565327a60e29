"""Experts through batched GEMMs, on two ranks: capacity factor, a weight picked for each row, broadcast weights.

Every layer is linear in its weight, so its exact gradient is that of the same code in float64. All of them stand in one
model: they cost one compilation.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_helpers import close, close_main_grad, compiled, no_outstanding_work, reduced, spy, world_mesh
from layer_forms import Layer, train
from ranks import run_ranks
from torch import Tensor, nn

import gtp_compile

E, N, K = 3, 10, 6


def layer(
    name: str,
    form: str,
    weight: tuple[int, ...],
    x: tuple[Any, ...],
    compute: Callable[[Tensor, Any, Tensor, Tensor], Tensor],
    bias: tuple[int, ...] = (),
    id_range: tuple[int, int] = (0, E),
) -> Layer:
    """A layer of one weight, perhaps a bias; `compute(weight, bias, x, ids)`, which is linear in both."""
    weights = {"weight": weight, "bias": bias} if bias else {"weight": weight}
    of_dict = lambda w, x, at: compute(w["weight"], w.get("bias"), x, at["ids"])  # noqa: E731
    return Layer(name, weights, {"weight": form}, x, of_dict, id_range)


def column(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)


LAYERS = (
    layer("bmm", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.bmm(x, w)),
    layer("bmm_out_first", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.bmm(x, w.mT)),
    layer("bmm_weight_left", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.bmm(w, x.mT)),
    layer("baddbmm", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.baddbmm(b, x, w), (E, 1, N)),
    layer("einsum", "bmm", (E, K, N), (E, "C", K), lambda w, b, x, i: torch.einsum("ecd,edf->ecf", x, w)),
    layer("einsum_out_first", "bmm", (E, N, K), (E, "C", K), lambda w, b, x, i: torch.einsum("ecd,efd->ecf", x, w)),
    layer("einsum_groups", "bmm", (E, K, N), (2, E, "C", K), lambda w, b, x, i: torch.einsum("gecd,edf->gecf", x, w)),
    layer("matmul_groups", "batch_sum", (E, K, N), (2, E, "C", K), lambda w, b, x, i: x @ w),
    layer("picked", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x)),
    layer(
        "picked_out_last", "picked", (E, K, N), ("S", K), lambda w, b, x, i: torch.bmm(x.unsqueeze(1), w[i]).squeeze(1)
    ),
    layer("picked_bias", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x) + b[i], (E, N)),
    layer("picked_from_the_end", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x), id_range=(-E, E)),
    layer("picked_few", "picked", (E, N, K), ("S", K), lambda w, b, x, i: column(w, i, x), id_range=(1, 2)),
    layer(
        "picked_sentinel",
        "picked",
        (E, N, K),
        ("S", K),
        lambda w, b, x, i: column(w, i.clamp(0, E - 1), x) * (i < E).to(x.dtype).unsqueeze(-1),
        id_range=(0, E + 2),
    ),
    layer(
        "picked_select", "picked", (E, N, K), ("S", K), lambda w, b, x, i: (w.index_select(0, i) @ x[..., None])[..., 0]
    ),
    layer("picked_einsum", "picked", (E, N, K), ("S", K), lambda w, b, x, i: torch.einsum("sk,snk->sn", x, w[i])),
    layer(
        "picked_pairs",
        "picked",
        (E, N, K),
        ("S", K),
        lambda w, b, x, i: torch.einsum("sk,sank->san", x, w[torch.stack([i, (i + 1) % E], 1)]),
    ),
    layer("picked_several_rows", "picked", (E, K, N), ("S", 4, K), lambda w, b, x, i: torch.bmm(x, w[i])),
    layer("broadcast", "batch_sum", (N, K), (4, "C", K), lambda w, b, x, i: torch.bmm(x, w.t().expand(4, -1, -1))),
    layer("broadcast_4d", "batch_sum", (1, 2, K, N), (4, 2, "C", K), lambda w, b, x, i: x @ w.expand(4, -1, -1, -1)),
)


def train_layers(rank: int, inner: str, names: tuple[str, ...]) -> tuple[int, dict[str, tuple[str, bool, float]]]:
    return train(rank, [layer for layer in LAYERS if layer.name in names], inner, COUNTS)


# step, rank
COUNTS = [
    [{"C": 5, "S": 9}, {"C": 5, "S": 9}],
    [{"C": 7, "S": 4}, {"C": 3, "S": 20}],
    [{"C": 4, "S": 6}, {"C": 9, "S": 5}],
]


ALL = tuple(layer.name for layer in LAYERS)
SOME = ("einsum_groups", "picked")


@pytest.mark.parametrize(
    ("inner", "names"),
    [("eager", ALL[:8]), ("eager", ALL[8:]), pytest.param("inductor", SOME, marks=pytest.mark.slow)],
    ids=["eager_capacity", "eager_picked_broadcast", "inductor"],
)
def test_every_layer_is_exact_and_says_its_form(inner, names, subtests):
    for graphs, rows in run_ranks(train_layers, 2, inner, names, timeout=600):
        assert graphs <= 2  # other counts of rows compile at most once more
        for layer in LAYERS:
            if layer.name in names:
                with subtests.test(layer.name):
                    form, matched, error = rows[f"units.{layer.name}.weight"]
                    assert (form, matched) == (layer.forms["weight"], True)
                    assert error <= 1e-6


class TwoPicks(nn.Module):
    """x [S, K] -> [S, N] -> [S, K], so that the second weight has an input gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(E, *shape) * 0.3) for shape in ((N, K), (K, N)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return column(self.down, ids, torch.tanh(column(self.up, ids, x)))


class TwoCapacities(nn.Module):
    """x [E, C, K] -> [E, C, N] -> [E, C, K], with biases, and the gradient of the second layer's output given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(E, *shape) * 0.3) for shape in ((N, K), (K, N)))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, N)), nn.Parameter(torch.randn(E, 1, K))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, self.up.mT) + self.up_bias.unsqueeze(1)
        return torch.bmm(y, self.down.mT) + self.down_bias


def few_rows(rank: int, kind: type[nn.Module], counts: tuple[int, ...]) -> list[str]:
    """A step with so many rows (of each expert, if by capacity) on each rank; the collectives that this rank issues."""
    torch.manual_seed(1)
    model, twin = kind(), kind().double()
    twin.load_state_dict(model.state_dict())
    dtype = torch.bfloat16 if kind is TwoCapacities else torch.float32
    gtp_compile.shard(model, world_mesh(), param_dtype=dtype)
    generator = torch.Generator().manual_seed(rank)
    if kind is TwoPicks:
        rows = (torch.randn(counts[rank], K, generator=generator), torch.randint(0, E, (counts[rank],)))
    else:
        rows = (torch.randn(E, counts[rank], K, generator=generator).to(dtype),)
    with spy() as seen:
        y = compiled(model, strict=True)(*rows)
        y.float().square().sum().backward()
    no_outstanding_work()
    exact = twin(rows[0].double(), *rows[1:])
    exact.square().sum().backward()
    for param, twins in zip(model.parameters(), twin.parameters(), strict=True):
        close_main_grad(param, reduced(twins.grad), 1e-6 if dtype == torch.float32 else 4e-2)
    return [repr(c) for c in seen]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        *[(TwoPicks, counts) for counts in [(1, 10), (10, 1), (1, 1), (0, 1)]],
        *[(TwoCapacities, counts) for counts in [(1, 10), (10, 1)]],
    ],
)
def test_a_rank_with_one_row_issues_the_same_collectives(kind, counts):
    """A batch of one row loses its dim in views, and a bias its sum; what is saved, or matched, must not follow."""
    first, second = run_ranks(few_rows, 2, kind, counts, timeout=60.0)
    assert first == second


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
