"""Notice a rank that evaluates alone, instead of waiting for the others for ever."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gtp_compile._compat import default_store

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
        self._job: Any = None  # the store that the count is of; another one after the process group was made anew
        self._store: Any = None
        self._count = 0
        self._left = ""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Meeting | None:
        """That of a mesh's ranks, the same one for all their models; None where there is nobody to meet."""
        if mesh.size() == 1 or dist.get_backend(mesh.get_group(0)) == "fake":
            return None
        return _meeting(tuple(sorted(mesh.mesh.flatten().tolist())))

    def wait(self, fqn: str, what: str = "a forward without gradients") -> None:
        """Return when all ranks are here, for the same weight.

        Raises:
            RuntimeError: somebody did not come in time; the message says what to do.
        """
        if self._job is not (job := default_store()):
            # A connection of its own: who waits on the job's keeps others from it.
            self._job, self._store, self._count, self._left = job, job.clone(), 0, ""
        keys = {rank: self._key(self._count, fqn, rank) for rank in self._ranks}
        mine = keys[dist.get_rank()]
        self._store.set(mine, "")
        try:
            self._store.wait(list(keys.values()), self.timeout)
        except RuntimeError as error:
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            self._store.delete_key(mine)
            raise RuntimeError(
                f"{fqn}: {what} needs all ranks of the sharded model, and rank(s) {absent} did not come in "
                f"{self.timeout.total_seconds():.0f} s. Call it on every rank; or, to evaluate on one, let all ranks "
                "enter `with gtp_compile.unsharded(model)`, inside which each can do what it wants"
            ) from error
        if self._left:  # everybody who is here has left the one before
            self._store.delete_key(self._left)
        self._left = mine
        self._count += 1

    def _key(self, count: int, fqn: str, rank: int) -> str:
        return f"gtp_compile/{self._ranks[0]}-{self._ranks[-1]}x{len(self._ranks)}/{count}/{fqn}/{rank}"


@functools.cache
def _meeting(ranks: tuple[int, ...]) -> Meeting:
    """One for each set of ranks: its count goes on over all their models, in the order of their forwards."""
    return Meeting(ranks)
