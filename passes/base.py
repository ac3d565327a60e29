"""What every pass gets and gives: its context, its report, and the one key under which it leaves notes on nodes."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

if TYPE_CHECKING:
    from gtp_compile.passes.order_collectives import JointOrder

__all__ = ["NOTE", "Pass", "PassContext", "PassReport", "Phase", "Skip", "operator_of", "outputs_of"]

Phase = Literal["joint", "backward", "inference"]

NOTE = "gtp"  # the one key of ours in node.meta


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may depend on, beside the graph: nothing that ranks or processes may differ in.

    Attributes:
        phase: which graph this is.
        num_fwd_outputs: how many outputs of a joint graph are the forward's (0 in other phases).
        programs: collects the chains that `verify` replays; None where nothing is recorded.
        joint_order: for a backward graph, the order of the joint graph it came from.
    """

    phase: Phase
    num_fwd_outputs: int = 0
    programs: "list[fx.Graph] | None" = None
    joint_order: "JointOrder | None" = None


@dataclass(frozen=True, slots=True)
class Skip:
    """One thing a pass looked at and left alone, and why."""

    node: str
    reason: str


@dataclass(slots=True)
class PassReport:
    """What one pass did.

    Attributes:
        matched: how many instances it found.
        changed: how many it rewrote.
        skipped: the ones it refused, with reasons.
    """

    matched: int = 0
    changed: int = 0
    skipped: list[Skip] = field(default_factory=list)

    def skip(self, node: fx.Node, reason: str) -> None:
        self.skipped.append(Skip(node.name, reason))


Pass = Callable[[fx.GraphModule, PassContext], PassReport]


def operator_of(node: fx.Node) -> Any:
    """What computed a node: of an operator with several results, it is a getitem that arrives."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    return source.target


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns: nodes, or None."""
    results: Any = graph.output_node().args[0]
    return list(results)
