"""Initialising a sharded model: seeded as the whole one is; built on meta, then given memory and values."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import BF16, expect, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
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


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16, padding_idx=7)


def padded(rank: int) -> None:
    """nn.Embedding zeroes a row of itself."""
    torch.manual_seed(0)
    want = Lookup()
    with torch.device("meta"):
        model = Lookup()
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out).to_empty(device="cpu")
    torch.manual_seed(0)
    model.embedding.reset_parameters()
    expect_equal("values", whole_values(model), dict(want.named_parameters()))


def test_an_embeddings_padding_row():
    run_ranks(padded, WORLD)


ROWS: dict[str, Callable[[Any], Any]] = {
    "item": lambda w: w[7].zero_(),
    "slice": lambda w: w[3:9].fill_(2.0),
    "data": lambda w: nn.init.zeros_(w.data[7]),
    "column_of_rows": lambda w: w[3:9][:, 2].mul_(3),
    "element": lambda w: w[9][4].fill_(5.0),
    "chunk": lambda w: w.chunk(3)[2].add_(1),
    "split": lambda w: w.split([4, 9])[1].sub_(1),
    "narrow": lambda w: w.narrow(0, 2, 5).mul_(2),
    "select": lambda w: w.select(0, 12).neg_(),
    "augmented": lambda w: w.__setitem__(4, w[4] * 2),
    "column_set": lambda w: w.__setitem__((slice(None), 3), 1.0),
    "diagonal": lambda w: w.diagonal().fill_(1.0),
    "transposed": lambda w: w.t()[1].zero_(),
    "columns": lambda w: w[:, 1:3].zero_(),
    "random": lambda w: w[5].normal_(),
    "uneven_rows": lambda w: w[1:12:2].clamp_(-0.1, 0.1),
    "set": lambda w: w.__setitem__(4, 1.0),
}


def rows_written(rank: int, dim: int | None) -> None:
    for how, write in ROWS.items():
        module = nn.Module()
        torch.manual_seed(1)
        module.weight = nn.Parameter(torch.randn(13, 16))
        full = module.weight.detach().clone()
        place = Replicate() if dim is None else Shard(dim)
        gtp_compile.shard(module, world_mesh(), shard_fn=lambda f, m, p, place=place: place)
        with torch.no_grad():
            for target in (full, module.weight):
                torch.manual_seed(7)
                write(target)
        expect(how, torch.equal(module.weight.full_tensor(), full), True)
        expect(f"{how}: the leaf", torch.equal(module.weight.leaf, module.weight.to_local()), True)
    read = module.weight[3]
    expect("a read", torch.equal(read.full_tensor(), full[3]), True)
    if dim is not None:
        expect("a copy of it is plain", type(copy.deepcopy(read)), DTensor)


@pytest.mark.parametrize("dim", [0, 1, None], ids=str)
@pytest.mark.works("writes to rows, columns, elements (`w[3].zero_()`, `w.data[3]`)", "reach the weight")
def test_writes_to_parts_of_a_weight(dim):
    run_ranks(rows_written, WORLD, dim)


def unequally_seeded(rank: int) -> None:
    """Replicas get one rank's draw."""
    with torch.device("meta"):
        model = Uneven()
    gtp_compile.shard(model, world_mesh()).to_empty(device="cpu")
    torch.manual_seed(rank)
    model.wide.reset_parameters()
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, model.wide.weight.leaf.detach().clone())
    expect("equal replicas", all(torch.equal(w, everyone[0]) for w in everyone), True)


def test_replicas_are_equal_however_ranks_are_seeded():
    run_ranks(unequally_seeded, WORLD)


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
