"""No match ignores an operand: what else has a say in a weight's gradient is handled, or refused with the reason.

Weights that meet another tensor before their GEMM (an adapter, a mask, a scale), activations that do before or behind
it (routing weights), factors inside the GEMM. Each gradient is held against float64 autograd of the same code. What
`explain` and `strict` say of the refused ones is in `test_refusals.py`.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import BF16, FP32
from layer_forms import Layer, grouped, train
from ranks import run_ranks
from torch import Tensor
from uneven import Warned

E, N, K = 3, 16, 8
DENSE, OUT_IN, IN_OUT, BATCH = (N, K), (E, N, K), (E, K, N), (E, "C", K)

layer = functools.partial(Layer, id_range=(0, E))


def routing(x: Tensor) -> Tensor:
    """A weight for each row `[R, 1]`, out of the rows themselves."""
    return x[:, :1] + 2.0


def scale(x: Tensor) -> Tensor:
    """A number for each expert `[E, 1, 1]`."""
    return routing(x)[:E, :, None]


def picked(weight: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)


def adapted(w: dict[str, Tensor], x: Tensor, at: dict) -> Tensor:
    return F.linear(x, w["weight"] + w["up"] @ w["down"])


def mixed(w: dict[str, Tensor], x: Tensor, at: dict) -> Tensor:
    """All experts on all rows, each with its share."""
    return torch.einsum("rk,re,enk->rn", x, x[:, :E], w["weight"])


def merged(w: dict[str, Tensor], x: Tensor, at: dict) -> Tensor:
    """Experts added up by their shares, then one GEMM."""
    return F.linear(x, torch.einsum("e,enk->nk", routing(x)[:E, 0], w["weight"]))


HANDLED = (
    layer(
        "adapter", {"weight": DENSE, "up": (N, 2), "down": (2, K)}, dict.fromkeys(("weight", "up", "down"), "mm"),
        ("R", K), adapted, is_rounded=True,
    ),
    layer(
        "two_weights", {"weight": DENSE, "other": DENSE}, {"weight": "mm", "other": "mm"}, ("R", K),
        lambda w, x, at: F.linear(x, torch.sub(w["weight"], w["other"], alpha=2)), is_rounded=True,
    ),
    layer(
        "numbers", {"weight": DENSE}, {"weight": "mm"}, ("R", K),
        lambda w, x, at: F.linear(x, -(w["weight"] * 2.0) / 4.0),
    ),
    layer(
        "baddbmm", {"weight": IN_OUT, "bias": (E, 1, N)}, {"weight": "bmm"}, BATCH,
        lambda w, x, at: torch.baddbmm(w["bias"], x, w["weight"], beta=0.5, alpha=2.0),
    ),
    layer(
        "routed_before", {"weight": OUT_IN}, {"weight": "grouped_mm"}, ("R", K),
        lambda w, x, at: grouped(x * routing(x), w["weight"].mT, at), is_rounded=True,
    ),
    layer(
        "routed_behind", {"weight": OUT_IN}, {"weight": "grouped_mm"}, ("R", K),
        lambda w, x, at: grouped(x, w["weight"].mT, at) * routing(x), is_rounded=True,
    ),
    layer(
        "picked_routed", {"weight": OUT_IN}, {"weight": "picked"}, ("S", K),
        lambda w, x, at: picked(w["weight"][at["ids"]], x) * routing(x), is_rounded=True,
    ),
    layer(
        "picked_routed_einsum", {"weight": OUT_IN}, {"weight": "picked"}, ("S", K),
        lambda w, x, at: torch.einsum("sk,snk,s->sn", x, w["weight"][at["ids"]], routing(x)[:, 0]), is_rounded=True,
    ),
    layer("mixed", {"weight": OUT_IN}, {"weight": "bmm"}, ("R", K), mixed, is_rounded=True),
    layer("merged", {"weight": OUT_IN}, {"weight": "bmm"}, ("R", K), merged, is_rounded=True),
)  # fmt: skip

REFUSED = tuple(
    layer(name, {"weight": shape}, {}, x, compute, is_rounded=True)
    for name, shape, x, compute in (
        ("scaled_bmm", OUT_IN, BATCH, lambda w, x, at: torch.bmm(x, (w["weight"] * scale(x[0])).mT)),
        ("scaled_grouped", OUT_IN, ("R", K), lambda w, x, at: grouped(x, (w["weight"] * scale(x)).mT, at)),
        ("scaled_picked", OUT_IN, ("S", K), lambda w, x, at: picked(w["weight"][at["ids"]] * routing(x)[..., None], x)),
        ("masked", DENSE, ("R", K), lambda w, x, at: F.linear(x, w["weight"] * (x[:1] > 0))),
        ("where", DENSE, ("R", K), lambda w, x, at: F.linear(x, torch.where(x[:1] > 0, w["weight"], 0))),
        ("triangle", DENSE, ("R", K), lambda w, x, at: F.linear(x, w["weight"].tril())),
        ("squared", DENSE, ("R", K), lambda w, x, at: F.linear(x, w["weight"] ** 2)),
        ("normalized", DENSE, ("R", K), lambda w, x, at: F.linear(x, F.normalize(w["weight"], dim=1))),
        ("rolled", DENSE, ("R", K), lambda w, x, at: F.linear(x, w["weight"].roll(1, 0))),
        ("penalized", DENSE, ("R", K), lambda w, x, at: F.linear(x, w["weight"]) + (w["weight"] ** 2).sum()),
    )
)

COUNTS = [[{"splits": [5, 0, 9], "R": 14, "S": 14, "C": 5}, {"splits": [2, 1, 4], "R": 7, "S": 7, "C": 5}]]


BF16_ONLY = ("routed_before", "routed_behind", "scaled_grouped")  # as torch's grouped GEMM on a CPU


def float32(rank: int) -> None:
    train(rank, [of for of in (*HANDLED, *REFUSED) if of.name not in BF16_ONLY], "eager", COUNTS, FP32)


@pytest.mark.long
def test_float32_gradients_lose_nothing():
    """In float32 nothing is refused."""
    run_ranks(float32, 2)


def handled(rank: int) -> dict[str, tuple[str, bool, float]]:
    return train(rank, HANDLED, "eager", COUNTS, BF16)[1]


def test_what_is_matched_is_exact(subtests):
    for rows in run_ranks(handled, 2):
        for of in HANDLED:
            for name, form in of.forms.items():
                with subtests.test(f"{of.name}.{name}"):
                    found, matched, error = rows[f"units.{of.name}.{name}"]
                    assert (found, matched) == (form, True)
                    assert error <= 1e-6


def refused(rank: int) -> list[str]:
    with Warned() as warned:
        train(rank, REFUSED, "eager", 2 * COUNTS, BF16, strict=False)
    return warned


def test_what_is_refused_is_right_and_warned_about_once():
    for warned in run_ranks(refused, 2):
        for of in REFUSED:
            assert sum(f"units.{of.name}.weight" in text for text in warned) == 1, of.name
