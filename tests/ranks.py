"""Run a function on several real (gloo) ranks, from a pool of processes that outlives one test.

Importing torch and Dynamo costs seconds, so all processes are forks of one that has imported them (and nothing more:
no group, no compilation, no thread), and they are kept. Between two calls Dynamo is reset and
every random generator seeded; a rank that fails or hangs ends its pool, and the next call starts a new one.
"""

import atexit
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch._inductor.compile_fx", "torch._functorch.aot_autograd", "gtp_compile"])
_POOLS: dict[int, "Pool"] = {}
DIED = "the process died"


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a gloo group and return what each returned, by rank.

    `fn` is a module-level function of a test module; arguments and results are pickled. Inside it `torch.distributed`
    is initialised. An exception on a rank is raised here with its traceback; so is a hang.
    """
    pool = _POOLS.get(world_size)
    if pool is None:
        pool = _POOLS[world_size] = Pool(world_size)
    try:
        return pool.call(fn, args, timeout)
    except BaseException:
        _POOLS.pop(world_size).close()
        raise


class Pool:
    """`world_size` processes, each one rank of a gloo group."""

    def __init__(self, world_size: int) -> None:
        self._store = tempfile.NamedTemporaryFile(prefix="gtp_ranks_", delete=False).name  # noqa: SIM115
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _FORKS.Pipe()
            process = _FORKS.Process(target=_serve, args=(rank, world_size, self._store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        atexit.register(self.close)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for end in self._ends:
            end.send((fn, args))
        results: dict[int, Any] = {}
        failures = {}
        waiting = {end: rank for rank, end in enumerate(self._ends)}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for end in ready:
                rank = waiting.pop(end)  # type: ignore[arg-type]
                try:
                    ok, results[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    process = self._processes[rank]
                    process.join(5.0)
                    ok, results[rank] = False, f"{DIED} (exit code {process.exitcode})"
                if not ok:
                    failures[rank] = f"rank {rank}:\n{results[rank]}"
                    # After one failure the others may wait for it in a collective for ever.
                    deadline = min(deadline, time.monotonic() + 5.0)
        if failures or waiting:
            late = {rank: f"rank {rank}: no answer in {timeout:.0f} s" for rank in waiting.values()}
            raise AssertionError("\n".join([*failures.values(), *late.values()]))
        return [results[rank] for rank in range(len(self._ends))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        if os.path.exists(self._store):
            os.unlink(self._store)


def _serve(rank: int, world_size: int, store: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            fn, args = end.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        torch.manual_seed(0)
        random.seed(0)
        try:
            end.send((True, fn(rank, *args)))
        except BaseException:
            end.send((False, traceback.format_exc()))
