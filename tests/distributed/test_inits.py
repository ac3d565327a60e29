"""Initialising a sharded model: seeded as the whole one is; built on meta, then given memory and values."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_helpers import BF16, expect, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from uneven import (
    Uneven,
    UnevenTwin,
    along_out,
    expect_equal,
    expect_sound,
    expect_trains,
    whole_values,
)

import gtp_compile

WORLD = 2

INITS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "kaiming_uniform": functools.partial(nn.init.kaiming_uniform_, a=5**0.5),
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "trunc_normal": functools.partial(nn.init.trunc_normal_, std=0.02),
    "trunc_normal_cut": functools.partial(nn.init.trunc_normal_, std=1.0, a=-0.5, b=0.5),
    "trunc_normal_tail": functools.partial(nn.init.trunc_normal_, std=1.0, a=2.0, b=3.0),
    "eye": nn.init.eye_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": functools.partial(nn.init.sparse_, sparsity=0.5),
    "dirac": nn.init.dirac_,
    "constant": functools.partial(nn.init.constant_, val=3.0),
    "data_normal": lambda p: p.data.normal_(0.0, 0.02),  # as Hugging Face's _init_weights did
    "data_uniform": lambda p: p.data.uniform_(-1.0, 1.0),
    "exponential": lambda p: p.exponential_(),
}


def initialised(rank: int, name: str, shape: tuple[int, ...], dim: int) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    full = torch.zeros(shape)
    gtp_compile.shard(module, world_mesh(), shard_fn=lambda f, m, p: Shard(dim))
    torch.manual_seed(7)
    with torch.no_grad():
        INITS[name](full)
    torch.manual_seed(7)
    with torch.no_grad():
        INITS[name](module.weight)
    after = torch.randn(2)
    torch.manual_seed(7)
    with torch.no_grad():
        INITS[name](torch.zeros(shape))
    expect("the random state goes on alike on every rank", torch.equal(after, torch.randn(2)), True)
    got = module.weight.full_tensor()
    if not torch.equal(got, full):
        raise AssertionError(f"{name}: differs by up to {(got - full).abs().max():.2e}")


@pytest.mark.parametrize("name", [name for name in INITS if name != "dirac"])  # dirac_ is for convolutions
@pytest.mark.works(
    "`torch.nn.init`, random methods, under one seed",
    "values as of the whole weight, cut to shards; one weight exists whole at a time",
)
def test_seeded_init_is_the_full_init_cut_to_shards(name):
    run_ranks(initialised, WORLD, name, (13, 16), 0)


@pytest.mark.parametrize("name", ["normal", "dirac"])
def test_seeded_init_of_a_stack(name):
    run_ranks(initialised, WORLD, name, (3, 13, 16), 1)


def on_meta(rank: int, how: str) -> None:
    torch.manual_seed(0)
    want = Uneven()
    want.register_buffer("steps", torch.arange(3.0))
    with torch.device("meta"):
        model = Uneven()
        model.register_buffer("steps", torch.zeros(3))
    with spy() as seen:
        gtp_compile.shard(model, world_mesh(), shard_fn=along_out, param_dtype=BF16)
    expect("nothing to send yet", seen, [])
    expect("takes no memory", {t.device.type for p in model.parameters() for t in (p.leaf, p.main_grad)}, {"meta"})
    if how == "reset":
        model.to_empty(device="cpu")
        model.steps.copy_(torch.arange(3.0))
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    elif how == "apply":
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.apply(init)
        torch.manual_seed(0)
        want.apply(init)
    elif how == "load":
        model.to_empty(device="cpu")
        model.load_state_dict(want.state_dict())
    else:
        model.load_state_dict(want.state_dict(), assign=True)
    expect_sound(model)
    expect_equal("values", whole_values(model), dict(want.named_parameters()))
    for name, param in model.named_parameters():
        expect(f"{name}: main_grad is zero", (param.main_grad.device.type, bool(param.main_grad.any())), ("cpu", False))
    if how == "apply":
        return
    expect_trains(model, UnevenTwin(want), rank)


def init(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.trunc_normal_(param, std=0.02)


@pytest.mark.parametrize("how", ["reset", "apply", "load", "assign"])
@pytest.mark.works(
    "build on meta, `shard`, `to_empty`, then `reset_parameters` or load",
    "never whole on any rank; values as if not sharded",
)
def test_a_model_built_on_meta(how):
    run_ranks(on_meta, WORLD, how)


def emptied_with_nan(rank: int) -> None:
    """What to_empty leaves in main_grad must not be added to."""
    with torch.device("meta"):
        model = Uneven()
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out, param_dtype=BF16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    expect("main_grads", any(bool(p.main_grad.isnan().any()) for p in model.parameters()), False)


def test_to_empty_zeroes_main_grad():
    run_ranks(emptied_with_nan, WORLD)
