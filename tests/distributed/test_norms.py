"""Gradient norms: each element of the model once, whatever holds it."""

from typing import Any

import pytest
import torch
from dist_helpers import close, compiled, expect
from ranks import run_ranks
from test_meshes import other_axes, over_first
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from uneven import along_out, loss, message, rows, start

from gtp_compile.parameters import like

PLACES = {"last": along_out, "first": over_first, "other_axes": other_axes}
MESHES = [
    ((4,), "last"),
    ((2, 2), "last"),
    ((2, 2), "first"),
    ((2, 2), "other_axes"),
    ((1, 4), "other_axes"),
    ((2, 1, 2), "last"),
]


def number(norm: Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def filled(shape: tuple[int, ...], place: str, value: float) -> nn.Module:
    """The model with this value in each element of each gradient."""
    model, _ = start(shape, shard_fn=PLACES[place])
    for param in model.parameters():
        param.main_grad.fill_(value)
        param.grad = like(param, param.main_grad)
    return model


def all_ones(rank: int, shape: tuple[int, ...], place: str) -> None:
    model = filled(shape, place, 1.0)
    distinct = sum(p.numel() for p in model.parameters())
    for foreach in (None, False):
        norm = number(clip_grad_norm_(model.parameters(), 1e9, foreach=foreach))
        expect("square of the norm", round(norm**2, 2), float(distinct))
    # PyTorch has no infinity norm of nothing, so of no DTensor with an empty part: `few`, `one` and `stacked` here.
    filled_up = [p for n, p in model.named_parameters() if n.startswith(("wide", "experts"))]
    expect("infinity norm", number(clip_grad_norm_(filled_up, 1e9, norm_type=float("inf"))), 1.0)
    expect("1-norm", number(clip_grad_norm_(model.parameters(), 1e9, norm_type=1)), float(distinct))
    expect(
        "get_total_norm", round(number(get_total_norm([p.grad for p in model.parameters()])) ** 2, 2), float(distinct)
    )
    clip_grad_norm_(model.parameters(), 0.5)
    for param in model.parameters():
        expect(f"{param.leaf.fqn}: in main_grad", torch.equal(param.main_grad, param.grad._local_tensor), True)
        if param.main_grad.numel():
            close(
                f"{param.leaf.fqn}: clipped",
                param.main_grad,
                torch.full_like(param.main_grad, 0.5 / distinct**0.5),
                1e-5,
            )
    clip_grad_value_(model.parameters(), 1e-3)
    expect(
        "clipped by value",
        max(p.main_grad.max().item() for p in model.parameters() if p.main_grad.numel()) <= 1.001e-3,
        True,
    )


@pytest.mark.parametrize(("shape", "place"), MESHES, ids=str)
@pytest.mark.works("`clip_grad_norm_`, sharded beside replicated", "the global norm, each element once")
def test_all_ones(shape, place):
    """The square root of the number of distinct elements: 208 + 13 + 65 + 5 + 3 * (112 + 7) + 288 = 936."""
    run_ranks(all_ones, 4, shape, place)


def trained(rank: int, shape: tuple[int, ...], place: str) -> None:
    model, twin = start(shape, shard_fn=PLACES[place])
    loss(compiled(model)(*rows(rank))).backward()
    twin.gradients(rows(rank)[0])
    close("norm", clip_grad_norm_(model.parameters(), 0.1).full_tensor(), clip_grad_norm_(twin.masters.values(), 0.1))
    close("again", clip_grad_norm_(model.parameters(), 0.1).full_tensor(), clip_grad_norm_(twin.masters.values(), 0.1))


@pytest.mark.parametrize(("shape", "place"), MESHES[:4], ids=str)
def test_the_norm_of_a_step(shape, place):
    run_ranks(trained, 4, shape, place)


def not_finite(rank: int, shape: tuple[int, ...], odd: int, value: float) -> Any:
    """One element of one shard (on all its replicas); every rank has to notice."""
    model = filled(shape, "last", 1.0)
    if model.wide.weight.leaf.shard_rank == odd:
        model.wide.weight.main_grad[0, 0] = value
    told = message(RuntimeError, lambda: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    expect("nothing was clipped", bool((model.few.weight.main_grad == 1).all()), True)
    norm = number(clip_grad_norm_(model.parameters(), 1.0))
    expect("without it: the norm", (norm != norm) if value != value else norm, True if value != value else float("inf"))
    return told


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize(("shape", "odd"), [((4,), 3), ((4,), 0), ((2, 2), 1)], ids=str)
@pytest.mark.works("`clip_grad_norm_(error_if_nonfinite=True)`", "raises on every rank")
def test_error_if_nonfinite_on_every_rank(shape, odd, value):
    for told in run_ranks(not_finite, 4, shape, odd, value):
        assert "non-finite" in told


def plain_beside(rank: int) -> None:
    """Parameters that nobody placed count as everywhere: PyTorch refuses to mix them with DTensors in one norm."""
    model, _ = start((4,), shard_fn=lambda f, m, p: None if f.startswith("few") else along_out(f, m, p))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    ours = [p for p in model.parameters() if isinstance(p, DTensor)]
    expect("ours", round(number(clip_grad_norm_(ours, 1e9)) ** 2, 2), float(sum(p.numel() for p in ours)))
    expect("plain", round(number(clip_grad_norm_([model.few.weight], 1e9)) ** 2, 2), 65.0)


def test_plain_parameters_have_a_norm_of_their_own():
    run_ranks(plain_beside, 4)
