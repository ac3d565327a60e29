"""Graph breaks inside expert blocks: said once, with the line of the user's code that breaks.

A block's own forward is the frame that Dynamo compiles where it breaks, so a block is told by its gathers: of a stack,
or of a child that is a GroupedLinear. A break between two GEMMs is none of the gradients' business: each part gathers
what it multiplies by. What lies across (a weight that is read before and multiplied behind) is rounded before its sum.
"""

from __future__ import annotations

import functools
import linecache
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from gtp_compile.bare_reads import real_inputs
from gtp_compile.grouped_linear import GroupedLinear
from gtp_compile.parameters import ComputeLeaf

__all__ = ["report_breaks"]

log = logging.getLogger(__name__)

_RESUMED = re.compile(r"torch_dynamo_resume_in_\w+_at_(\d+)")


def report_breaks(gm: fx.GraphModule, example_inputs: Sequence[Any], strict: bool) -> None:
    """Warn, once a line, of the breaks at which this Dynamo graph begins or ends inside an expert block.

    Raises:
        RuntimeError: there is one, and `strict` is set.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)  # wrappers hand over graphs of their own
    breaks = list(_breaks(reason)) if reason is not None and reason.user_stack else []
    name = _expert_weight(gm, example_inputs) if breaks else None
    for file, line in breaks if name else ():
        message = _message(name, file, line)
        if strict:
            raise RuntimeError(f"strict: {message}")
        if (file, line) not in _said():
            _said().add((file, line))
            log.warning("%s", message)


def _breaks(reason: Any) -> Iterator[tuple[str, int]]:
    """File and line of the breaks before and behind a graph, in the frame that it was captured from."""
    frame = reason.user_stack[0]
    resumed = _RESUMED.fullmatch(frame.name)
    if resumed:
        yield frame.filename, int(resumed[1])
    if reason.graph_break:
        yield frame.filename, frame.lineno


def _expert_weight(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """The first expert weight that the frame's own module gathers in a graph, or a GroupedLinear in it."""
    inputs = real_inputs(gm, example_inputs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gtp.materialize.default):
        leaves: Any = node.args[0]
        leader = inputs[leaves[0]]
        if not isinstance(leader, ComputeLeaf):
            continue
        below = [cls for _, cls in node.meta.get("nn_module_stack", {}).values()]
        is_stack = not below and leader.ndim > 2
        if is_stack or (len(below) == 1 and issubclass(below[0], GroupedLinear)):
            return leader.fqn
    return None


def _message(name: str | None, file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    return (
        f"{file}:{line}: a graph break inside the experts of {name}, at `{source}`; nothing is fused or overlapped "
        "across it, and a weight that is read before it and multiplied behind it is rounded before its sum "
        "(gtp_compile.explain says which); torch.compile(..., fullgraph=True) says why it breaks"
    )


@functools.cache
def _said() -> set[tuple[str, int]]:
    """The lines of this process that were said; equal layers break at one."""
    return set()
