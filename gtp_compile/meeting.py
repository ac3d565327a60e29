"""Notice a rank that evaluates alone, instead of waiting for the others for ever."""

from __future__ import annotations

import functools
import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gtp_compile._compat import default_store, is_fake
from gtp_compile.running import running_forwards

__all__ = ["Meeting"]


class Meeting:
    """Where the ranks of a mesh meet before a forward without gradients.

    Training is the same on all ranks by its nature; evaluation is what people run on rank 0 only, and there the first
    gather would wait for ranks that never come, or meet another collective of theirs. They meet in the job's key-value
    store: a process group of its own would have to be made on all ranks, also where a model comes out of a file.

    Attributes:
        timeout: how long the first one waits.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.timeout = timedelta(seconds=60)
        self._ranks = ranks
        self._name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        self._job: Any = None  # the store that the count is of; another one after the process group was made anew
        self._store: Any = None
        self._count = 0
        self._left: list[str] = []

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Meeting | None:
        """That of a mesh's ranks, the same one for all their models; None where there is nobody to meet."""
        if mesh.size() == 1 or is_fake(mesh.get_group(0)):
            return None
        return _meeting(tuple(sorted(mesh.mesh.flatten().tolist())))

    def wait_once(self, fqn: str) -> None:
        """`wait`, but once for all weights below one outermost `forward` of a sharded model."""
        *_, outermost = [None, *running_forwards()]
        if outermost is None:
            self.wait(fqn)
        elif _MET not in outermost.f_locals:
            self.wait(fqn)
            outermost.f_locals[_MET] = True  # lives as long as the call does

    def wait(self, fqn: str, what: str = "a forward without gradients") -> None:
        """Return when all ranks are here, for the same weight.

        Raises:
            RuntimeError: somebody did not come in time; the message says what to do.
        """
        if self._job is not (job := default_store()):
            # A connection of its own: who waits on the job's keeps others from it.
            self._job, self._store, self._count, self._left = job, job.clone(), 0, []
        prefix = f"gtp_compile/{self._name}/{self._count}/{fqn}/"
        mine, arrived, all_here = f"{prefix}{dist.get_rank()}", f"{prefix}arrived", f"{prefix}all"
        self._store.set(mine, "")
        if self._store.add(arrived, 1) == len(self._ranks):
            self._store.set(all_here, "")
        try:
            self._store.wait([all_here], self.timeout)
        except RuntimeError as error:
            absent = [rank for rank in self._ranks if not self._store.check([f"{prefix}{rank}"])]
            self._store.add(arrived, -1)
            self._store.delete_key(mine)
            raise RuntimeError(
                f"{fqn}: {what} needs all ranks of the sharded model, and rank(s) {absent} did not come in "
                f"{self.timeout.total_seconds():.0f} s. Call it on every rank; or, to evaluate on one, let all ranks "
                "enter `with gtp_compile.unsharded(model)`, inside which each can do what it wants"
            ) from error
        for key in self._left:  # everybody who is here has left the one before
            self._store.delete_key(key)
        self._left = [mine, arrived, all_here] if dist.get_rank() == self._ranks[0] else [mine]
        self._count += 1


_MET = "<gtp_compile: the ranks have met>"


@functools.cache
def _meeting(ranks: tuple[int, ...]) -> Meeting:
    """One for each set of ranks: its count goes on over all their models, in the order of their forwards."""
    return Meeting(ranks)
