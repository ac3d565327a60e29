"""A compilation that somebody watches: what `explain`, `verify` and `testing` learn from the backend.

Found through a context variable that is set only around the watched call; an ordinary compilation has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gtp_compile.graph_log import GraphLog
from gtp_compile.passes.describe import GroupInfo

__all__ = ["CapturedGraph", "Session", "current_session", "watch"]


@dataclass(slots=True)
class CapturedGraph:
    """One graph that the backend got.

    Attributes:
        log: what each pass did.
        groups: its weight groups (none in an inference graph).
        hooked: of each group that another tool distributes, the positions of its members among the inputs (leader
            first), and the compute dtype.
        calls: for each run of the graph, the names of its inputs ("" where an input is no weight); equal layers share
            one graph, so a graph may have several calls with different names.
        joint: the joint graph before the first pass, where the session asked for it.
        inputs: what the graph was last called with, likewise.
        num_fwd_outputs: how many outputs of the joint graph are the forward's.
    """

    log: GraphLog
    groups: list[GroupInfo] = field(default_factory=list)
    hooked: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    joint: fx.GraphModule | None = None
    inputs: tuple[Any, ...] = ()
    num_fwd_outputs: int = 0


@dataclass(slots=True)
class Session:
    """What a watched compilation collects, and what it asks of the backend.

    Attributes:
        record: put `gtp::record` into the graphs; `programs` gets the chains (see `passes.record_operands`).
        dry: run the graphs without communicating (see `dry_run`).
        keep_joint: keep a copy of each joint graph as captured.
        names: the names of parameters that are not ours, by `id`.
        keep_text: keep the text of each graph around every pass, and check each node's metadata behind it.
    """

    record: bool = False
    dry: bool = False
    keep_joint: bool = False
    names: dict[int, str] = field(default_factory=dict)
    keep_text: bool = True
    graphs: list[CapturedGraph] = field(default_factory=list)
    programs: list[fx.Graph] = field(default_factory=list)


_SESSION: ContextVar[Session | None] = ContextVar("gtp_compile_session", default=None)


def current_session() -> Session | None:
    """The session that watches this compilation, if any."""
    return _SESSION.get()


@contextlib.contextmanager
def watch(session: Session) -> Iterator[Session]:
    """Make `session` see what is compiled inside the block."""
    token = _SESSION.set(session)
    try:
        yield session
    finally:
        _SESSION.reset(token)
