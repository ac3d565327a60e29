"""DistributedDataParallel and FSDP2 in one model with sharded weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import compiled, expect, reductions, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from uneven import loss, message

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.backend import gtp

WORLD = 2


class Block(nn.Module):
    """Dense layer, norm (theirs) and experts of 13 features (ours)."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(256, 1024), nn.LayerNorm(256)
        self.experts = GroupedLinear(2, 1024, 13, bias=False)
        self.back = nn.Linear(13, 256)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return x + self.norm(self.back(self.experts(torch.relu(self.dense(x)), splits)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, splits)
        return self.last(x)


def ours(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | None:
    return Shard(0) if "experts" in fqn else None


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 256, generator=generator), torch.tensor([3, 5])


def pair_of_models() -> tuple[Model, Model]:
    torch.manual_seed(1)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    return model, twin


def compare(model: nn.Module, twin: Model, steps: int, rank: int) -> None:
    """Each `.grad` against the mean over the ranks' batches, summed over steps, as one process has it."""
    for i in range(steps):
        for r in range(WORLD):
            (loss(twin(*rows(r, i))) / WORLD).backward()
    for (name, param), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        if not torch.allclose(grad, theirs.grad, atol=1e-5, rtol=1e-4):
            raise AssertionError(f"{name}: differs by {(grad - theirs.grad).abs().max():.2e}")


@contextlib.contextmanager
def ddp_optimizer(mode: bool | str) -> Iterator[None]:
    with torch._dynamo.config.patch(optimize_ddp=mode):
        yield


class Counted:
    """The backend, and how many graphs it was given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.calls += 1
        return gtp(gm, example_inputs, options={"inner": "eager"})


def beside_ddp(rank: int, mode: bool | str, how: str) -> None:
    model, twin = pair_of_models()
    gtp_compile.shard(model, world_mesh(), shard_fn=ours)
    names = [n for n, _ in model.named_parameters() if "experts" in n]
    expect("left to us", [n for n in model._ddp_params_and_buffers_to_ignore], names)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)  # several buckets
    plain = sum(p.numel() for n, p in model.named_parameters() if n not in names)
    run = ddp
    backend = Counted()
    with ddp_optimizer(mode):
        if how == "around":
            run = torch.compile(ddp, backend=backend)
        elif how == "inside":
            for layer in model.layers:
                layer.compile(backend="gtp", options={"inner": "eager"})
        for i in range(2):
            with spy() as seen:
                loss(run(*rows(rank, i))).backward()
        sums = [c for c in reductions(seen) if c.kind == "all_reduce"]
        expect("what DDP sums is all that is not ours, once", sum(c.numel for c in sums), plain)
        scattered = [c.numel for c in reductions(seen) if c.kind == "reduce_scatter"]
        expect("ours, padded to 14 rows", scattered, [2 * 14 * 1024] * 2)
    if how == "around" and mode:
        expect("parts of the split graph", backend.calls > 1, True)
    compare(model, twin, 2, rank)


@pytest.mark.parametrize("mode", [True, False], ids=["optimizer_on", "optimizer_off"])
@pytest.mark.parametrize("how", ["around", "inside", "eager"])
@pytest.mark.works(
    "`DistributedDataParallel` around the model, with its graph splitting or without",
    "leaves ours alone, sums the rest",
)
def test_ddp_around_a_sharded_model(how, mode):
    run_ranks(beside_ddp, WORLD, mode, how)


def ddp_no_sync(rank: int) -> None:
    """Under DDP's no_sync ours are reduced at once, theirs later; the sums are the same."""
    model, twin = pair_of_models()
    gtp_compile.shard(model, world_mesh(), shard_fn=ours)
    ddp = DistributedDataParallel(model)
    step = compiled(ddp, fullgraph=False)
    with ddp.no_sync():
        loss(step(*rows(rank, 0))).backward()
    loss(step(*rows(rank, 1))).backward()
    compare(model, twin, 2, rank)


def test_ddp_no_sync():
    run_ranks(ddp_no_sync, WORLD)


def all_ours(rank: int) -> str:
    """A model with every parameter placed leaves DDP nothing to do, which DDP itself says."""
    model, _ = pair_of_models()
    gtp_compile.shard(model, world_mesh())
    return message(RuntimeError, lambda: DistributedDataParallel(model))


@pytest.mark.works("`DistributedDataParallel` where all is ours", "refused by PyTorch")
def test_ddp_around_nothing():
    for told in run_ranks(all_ours, WORLD):
        assert "any parameter that requires a gradient" in told or "doesn't have any" in told, told


def beside_fsdp(rank: int, how: str) -> None:
    """fully_shard on the first and last layers, ours in between."""
    model, twin = pair_of_models()
    for layer in model.layers:
        gtp_compile.shard(layer, world_mesh())
    for theirs in (model.first, model.last):
        fully_shard(theirs, mesh=world_mesh())
    run = model
    if how == "whole":
        run = compiled(model, fullgraph=False)
    elif how == "layers":
        for layer in model.layers:
            layer.compile(backend="gtp", fullgraph=True, options={"inner": "eager"})
    for i in range(2):
        loss(run(*rows(rank, i))).backward()
    compare(model, twin, 2, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    expect("norm", torch.allclose(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0), rtol=1e-5), True)
    optimizer.step()
    torch.optim.AdamW(twin.parameters(), lr=1e-2).step()
    for (name, param), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        expect(name, torch.allclose(param.full_tensor(), theirs, atol=1e-4), True)


@pytest.mark.parametrize("how", ["whole", "layers", "eager"])
@pytest.mark.works("`fully_shard` on other modules", "works beside ours")
def test_fsdp2_on_other_modules(how):
    run_ranks(beside_fsdp, WORLD, how)


def fsdp_root(rank: int) -> str:
    """fully_shard around ours takes DTensors for tensor parallelism of its own; either it works or it says so."""
    model, twin = pair_of_models()
    for layer in model.layers:
        gtp_compile.shard(layer, world_mesh())
    try:
        fully_shard(model, mesh=world_mesh())
        loss(model(*rows(rank, 0))).backward()
        compare(model, twin, 1, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.works("`fully_shard` around ours without `ignored_params`", "refused by PyTorch")
def test_fully_shard_around_ours():
    for told in run_ranks(fsdp_root, WORLD):
        assert told, "it works now: say so in the README"


def fsdp_ignored(rank: int) -> None:
    """With ignored_params, FSDP2 may be the root of the model."""
    model, twin = pair_of_models()
    for layer in model.layers:
        gtp_compile.shard(layer, world_mesh())
    placed = {p for layer in model.layers for p in layer.parameters()}
    fully_shard(model, mesh=world_mesh(), ignored_params=placed)
    for layer in model.layers:
        layer.compile(backend="gtp", fullgraph=True, options={"inner": "eager"})
    for i in range(2):
        loss(model(*rows(rank, i))).backward()
    compare(model, twin, 2, rank)


@pytest.mark.works("`fully_shard` on the root with `ignored_params`", "works beside ours")
def test_fsdp2_as_the_root_ignoring_ours():
    run_ranks(fsdp_ignored, WORLD)


def gtp_over_fsdp(rank: int) -> str:
    model, _ = pair_of_models()
    fully_shard(model.first, mesh=world_mesh())
    return message(ValueError, lambda: gtp_compile.shard(model, world_mesh()))


@pytest.mark.works("`shard` over parameters of `fully_shard`", "refused")
def test_shard_over_fsdps_parameters_is_refused():
    for told in run_ranks(gtp_over_fsdp, WORLD):
        assert told == (
            "first.weight: is a DTensor of another tool; let shard_fn return None for it, or shard it here only"
        )
    assert dist.is_initialized() is False
