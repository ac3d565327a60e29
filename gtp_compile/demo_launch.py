"""Run one worker function in several processes: their messages as they come, and no process left behind."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["RankFailed", "Send", "Warned", "Worker", "launch"]

Send = Callable[[Any], None]
# worker(rank, settings, store, send): `store` is a file for the process group's rendezvous.
Worker = Callable[[int, Any, str, Send], None]

# How long the others may take to say what they know, once one has failed: the one that was killed says nothing.
_GRACE = 3.0


class RankFailed(RuntimeError):
    """A process ended with an error; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Warned:
    """A Python warning of one rank."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class _Failed:
    rank: int
    text: str


def launch(worker: Worker, ranks: int, settings: Any) -> Generator[Any, None, None]:
    """Start `ranks` processes and yield what they send, until all have ended; use it with `contextlib.closing`.

    Raises:
        RankFailed: one failed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gtp-demo-") as folder:
        readers: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            with _quiet_children():
                for rank in range(ranks):
                    reader, writer = context.Pipe(duplex=False)
                    args = (worker, rank, settings, os.path.join(folder, "store"), writer)
                    process = context.Process(target=_child, args=args, name=f"rank {rank}", daemon=True)
                    process.start()
                    writer.close()
                    readers.append(reader)
                    processes.append(process)
            yield from _messages(readers, processes)
        finally:
            _end(processes)


def _child(worker: Worker, rank: int, settings: Any, store: str, writer: Connection) -> None:
    # The default action, not Python's: a rank that waits in a collective never gets to raise KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.showwarning = functools.partial(_send_warning, writer, rank)  # type: ignore[assignment]
    try:
        worker(rank, settings, store, writer.send)
    except BaseException:
        # What the parent's end has to do with it no longer matters, and other threads may never end.
        with contextlib.suppress(OSError):
            writer.send(_Failed(rank, traceback.format_exc()))
        os._exit(1)


def _send_warning(
    writer: Connection, rank: int, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any
) -> None:
    writer.send(Warned(rank, f"{category.__name__}: {message}"))


def _messages(readers: list[Connection], processes: list[BaseProcess]) -> Generator[Any, None, None]:
    running = set(range(len(processes)))
    failures: list[_Failed] = []
    deadline = None
    while running and (deadline is None or time.monotonic() < deadline):
        handles: list[Any] = [h for r in running for h in (readers[r], processes[r].sentinel)]
        wait(handles, timeout=None if deadline is None else 0.1)
        for rank in sorted(running):
            for message in _received(readers[rank], processes[rank]):
                if isinstance(message, _Failed):
                    failures.append(message)
                elif not failures:
                    yield message
            code = processes[rank].exitcode
            if code is not None:
                running.discard(rank)
                if code and all(f.rank != rank for f in failures):
                    failures.append(_Failed(rank, _describe_exit(code)))
        if failures and deadline is None:
            deadline = time.monotonic() + _GRACE
    if failures:
        # One that a signal ended is the cause; the others then lose their connection, and say so sooner.
        killed = [f for f in failures if (processes[f.rank].exitcode or 0) < 0]
        first = (killed or failures)[0]
        raise RankFailed(f"rank {first.rank} of {len(processes)} failed:\n{first.text.rstrip()}")


def _received(reader: Connection, process: BaseProcess) -> Iterator[Any]:
    try:
        while reader.poll():
            yield reader.recv()
    except (EOFError, OSError):
        process.join(timeout=60)  # the interpreter is on its way out


def _describe_exit(code: int) -> str:
    if code < 0:
        hint = "; is there enough memory?" if -code == signal.SIGKILL else ""
        return f"it was ended by signal {-code} ({signal.Signals(-code).name}){hint}"
    return f"it ended with exit code {code}; what it said is above"


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def _quiet_children() -> Iterator[None]:
    """What processes started inside inherit, so that the end of a rank is reported by us alone.

    Ctrl-C reaches every process of a terminal: one that still imports would answer it with a traceback. And of a rank
    that is killed, multiprocessing's own tracker of semaphores would say that it left some behind.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    filters = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (filters, "ignore:resource_tracker:UserWarning")))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        if filters is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = filters
