"""A compiled graph that multiplies by experts of a list, where a forward in eager has gathered them.

Such a forward (`eager_forward`) breaks the graph, and what Dynamo captures of it has the experts that this rank's batch
hits. Its collectives may not be in the graph then: it runs as Dynamo handed it over, with the gathered weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gtp_compile.bare_reads import real_inputs
from gtp_compile.eager_forward import read_whole, scopes_of
from gtp_compile.expert_lists import read_in_part
from gtp_compile.graph_log import copy_module
from gtp_compile.parameters import ComputeLeaf

__all__ = ["ExpertGraph"]

_ANCHOR = torch.ops.gtp.materialize.default


class ExpertGraph:
    """A Dynamo graph with experts of a list, to be run in eager.

    Attributes:
        never_captured: it has not all experts, in a forward that has them gathered: nothing needs to be compiled.
    """

    def __init__(self, gm: fx.GraphModule, never_captured: bool) -> None:
        self.never_captured = never_captured
        self._module = _reading_wholes(gm)

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> ExpertGraph | None:
        """That of a graph that the backend got; None where there is no expert of a list in it."""
        inputs = real_inputs(gm, example_inputs)
        listed = [x for x in inputs.values() if isinstance(x, ComputeLeaf) and x.experts is not None]
        if not listed:
            return None
        return cls(gm, bool(read_in_part(listed)) and any(leaf.scope is not None for leaf in listed))

    def runs_captured(self, leaves: Sequence[ComputeLeaf]) -> bool:
        """Whether this call, with these weights, is left to the compiled graph; on every rank it is then."""
        has_all = not read_in_part(leaves)
        scopes = scopes_of(leaf for leaf in leaves if leaf.experts is not None)
        return all([scope.runs_captured(has_all) for scope in scopes])

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs, with autograd's eager graph behind them."""
        return self._module(*args)


def _reading_wholes(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` that reads weights as eager code does."""
    gm = copy_module(gm)
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for node in module.graph.find_nodes(op="call_function", target=_ANCHOR):
            node.target = _materialize
        module.recompile()
    return gm


def _materialize(shards: list[Any], *constants: Any) -> Tensor:
    """`gtp::materialize` in eager."""
    if len(shards) > 1 and all(leaf.scope is None for leaf in shards):
        return _ANCHOR(shards, *constants)
    wholes = [read_whole(leaf) for leaf in shards]
    return wholes[0] if len(wholes) == 1 else torch.stack(wholes)
