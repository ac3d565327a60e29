"""Notice a rank that evaluates alone, instead of waiting for the others for ever."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Meeting"]


@dataclass(slots=True)
class Meeting:
    """Where the ranks of a sharded model meet before a forward without gradients.

    Training is the same on all ranks by its nature; evaluation is what people run on rank 0 only, and there the first
    gather would wait for ranks that never come, or meet another collective of theirs.

    Attributes:
        group: a gloo group of the mesh's ranks; None: nobody to meet.
        timeout: how long the first one waits.
    """

    group: dist.ProcessGroup | None
    timeout: timedelta = timedelta(seconds=60)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Meeting:
        """For the ranks of a mesh (collective among them)."""
        if mesh.size() == 1 or dist.get_backend(mesh.get_group(0)) == "fake":
            return cls(None)
        # A group of its own: the others may be in a collective of the mesh's.
        ranks = sorted(mesh.mesh.flatten().tolist())
        return cls(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    def wait(self, fqn: str) -> None:
        """Return when all ranks are here.

        Raises:
            RuntimeError: somebody did not come in time; the message says what to do.
        """
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timeout=self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"{fqn}: a forward without gradients needs all ranks of the sharded model, and some did not come in "
                f"{self.timeout.total_seconds():.0f} s. Call it on every rank; or, to evaluate on one, let all ranks "
                "enter `with gtp_compile.unsharded(model)`, inside which each can do what it wants"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
        return Meeting(self.group, self.timeout)

    def __reduce__(self) -> Any:
        return Meeting, (None,)  # a process group can't be saved
