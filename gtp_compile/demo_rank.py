"""One rank of the demo: train, then (rank 0) the twin, then verify; what it has to say goes out as messages."""

from __future__ import annotations

import datetime
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gtp_compile
from gtp_compile.demo_launch import Send
from gtp_compile.demo_model import LEARNING_RATE, MAX_NORM, Batches, DemoSettings, Twin, build_model

__all__ = ["Finished", "Phase", "Started", "Step", "run_rank"]

# A rank waits while another compiles, or while rank 0 trains the twin.
_PATIENCE = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks are connected and the model is sharded."""

    model: str
    parameters: int
    device: str


@dataclass(frozen=True, slots=True)
class Phase:
    """Another part of the work begins: "compile", "train", "twin", "verify", "verify_unretyped" or "graphs"."""

    name: str
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the current phase; `seconds` is the time it took (0 for the one that compiled)."""

    number: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """What came out.

    Attributes:
        loss, twin_loss: one value a step, the mean over microbatches and ranks.
        retyped, unretyped: what `verify` measured, as `Verification.to_dict()`.
        passes: what each pass did to the training graph: {"pass", "phase", "matched", "changed", "milliseconds"}.
    """

    loss: list[float]
    twin_loss: list[float]
    retyped: dict[str, Any]
    unretyped: dict[str, Any]
    passes: list[dict[str, Any]]


def run_rank(rank: int, settings: DemoSettings, store: str, send: Send) -> None:
    """The worker of `demo_launch.launch`."""
    # Dynamo's remark on a cached helper of transformers, which it inlines; there's nothing in it for the reader.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.set_num_threads(settings.threads)
    device = torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.ranks,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    _work(rank, settings, device, send if rank == 0 else _say_nothing)
    dist.destroy_process_group()


def _say_nothing(message: Any) -> None:
    pass


def _work(rank: int, settings: DemoSettings, device: torch.device, send: Send) -> None:
    trainer = _Trainer(rank, settings, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    send(Started(trainer.name, trainer.parameters, name))

    send(Phase("compile"))
    loss = [_timed_step(trainer, 0, _say_nothing)]
    send(Phase("train", settings.steps))
    send(Step(1, loss[0], 0.0))
    loss += [_timed_step(trainer, step, send) for step in range(1, settings.steps)]

    send(Phase("twin", settings.steps))
    twin_loss: list[float] = []
    if rank == 0:
        twin = Twin(settings, device)
        twin_loss = [_timed_step(twin, step, send) for step in range(settings.steps)]
    dist.barrier()

    batch = trainer.batches.get(settings.steps, rank, 0)  # text that training has not met
    options: dict[str, Any] = {"inner": settings.inner}
    send(Phase("verify"))
    retyped = gtp_compile.verify(trainer.model, options=options)(**batch)
    send(Phase("verify_unretyped"))
    unretyped = gtp_compile.verify(trainer.model, options={**options, "disable": ["retype_wgrads"]})(**batch)

    if rank == 0:
        send(Phase("graphs"))
        passes = _write_graphs(trainer.model, settings, batch)
        send(Finished(loss, twin_loss, retyped.to_dict(), unretyped.to_dict(), passes))
    dist.barrier()


class _Trainer:
    """The loop that a user writes, with gtp_compile's two lines in it."""

    def __init__(self, rank: int, settings: DemoSettings, device: torch.device) -> None:
        self._rank, self._settings, self._device = rank, settings, device
        self.batches = Batches(settings, device)
        model = build_model(settings.seed, device)
        self.name = type(model).__name__
        self.parameters = sum(p.numel() for p in model.parameters())
        mesh = init_device_mesh(device.type, (settings.ranks,), mesh_dim_names=("gtp",))
        gtp_compile.shard(model, mesh, param_dtype=torch.bfloat16)
        self.model: Any = torch.compile(model, backend="gtp", fullgraph=True, options={"inner": settings.inner})
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(self, step: int) -> float:
        """Train one step, and return the loss, the mean over microbatches and ranks."""
        total = torch.zeros((), device=self._device)
        self._optimizer.zero_grad()
        for microbatch in range(self._settings.microbatches):
            batch = self.batches.get(step, self._rank, microbatch)
            loss = self.model(**batch).loss / self._settings.microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        dist.all_reduce(total)
        return total.item() / self._settings.ranks


def _timed_step(trainer: _Trainer | Twin, step: int, send: Send) -> float:
    start = time.perf_counter()
    loss = trainer.step(step)
    send(Step(step + 1, loss, time.perf_counter() - start))
    return loss


def _write_graphs(model: nn.Module, settings: DemoSettings, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Have `explain` write the training graph before and after every pass; nothing communicates."""
    options = {"inner": settings.inner, "debug_dir": settings.graphs}
    explanation = gtp_compile.explain(model, options=options)(**batch)
    return [
        {
            "pass": run.name,
            "phase": run.phase,
            "matched": run.report.matched,
            "changed": run.report.changed,
            "milliseconds": run.milliseconds,
        }
        for runs in explanation.graphs
        for run in runs
    ]
