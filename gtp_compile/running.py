"""Which modules of sharded models are running, told by the call stack.

A flag set around forward would not do: Dynamo may run a wrapper compiled and the forward in it not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

__all__ = ["running_forwards"]


def running_forwards(tree: Any = None) -> Iterator[FrameType]:
    """The callers that are the `forward` of a module of a sharded model (of `tree`, if given), innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_forward(frame, tree):
            yield frame
        frame = frame.f_back


def _is_forward(frame: FrameType, tree: Any) -> bool:
    """Whether a frame is such a `forward`, or its rest behind a graph break."""
    name = frame.f_code.co_name
    if not (name == "forward" or name.startswith("torch_dynamo_resume_in_forward")) or not frame.f_code.co_argcount:
        return False
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    found = first.__dict__.get("_gtp_tree") if isinstance(first, nn.Module) else None
    return found is not None and tree in (None, found)
