"""Give the collectives of a backward graph an order that depends on the joint graph alone.

Before:  all_gather(b), reduce_scatter(b), all_gather(a), reduce_scatter(a)      on rank 0
         all_gather(b), all_gather(a), reduce_scatter(b), reduce_scatter(a)      on rank 1, with another batch
After:   the first order on both

What the partitioner recomputes depends on sizes, and ranks differ in their token counts, so their backward graphs may
differ; two ranks that issue collectives in different orders wait for each other for ever. The joint graphs are alike:

1. A reduction stands where it stood in the joint graph.
2. A gather that backward repeats stands before its first use by a node that depended on a tangent there. (Other nodes
   that only backward reads, such as sizes, may stand anywhere.)

Another tool's protocol hooks may communicate, too, and take part like collectives.

Inductor keeps the order in which collectives stand in the graph that it gets.

Needs: the partition, and the joint graph's order in the context. Leaves: the same sequence of starts on all ranks.
"""

import itertools

import torch
from torch import fx

from gtp_compile.passes.base import PassContext, PassReport, outputs_of
from gtp_compile.passes.hooked import is_hooked
from gtp_compile.passes.ordering import stable_sort

__all__ = ["JointOrder", "is_collective_start", "is_tangent", "order_collectives"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class JointOrder:
    """Where each node stood in the joint graph, by name; which of them forward had no need of, and which depended on a
    tangent."""

    def __init__(self, graph: fx.Graph, num_fwd_outputs: int) -> None:
        self.position = {n.name: i for i, n in enumerate(graph.nodes)}
        forward: set[fx.Node] = set()
        todo = [n for n in outputs_of(graph)[:num_fwd_outputs] if isinstance(n, fx.Node)]
        while todo:
            node = todo.pop()
            if node not in forward:
                forward.add(node)
                todo += node.all_input_nodes
        self.backward = {n.name for n in graph.nodes if n.op == "call_function" and n not in forward}
        gradients: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or any(a in gradients for a in node.all_input_nodes):
                gradients.add(node)
        self.gradients = {n.name for n in gradients}


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a gradient that comes into a joint graph (told by its name, as torch does it)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_collective_start(node: fx.Node) -> bool:
    """Whether a node launches a collective (the wait is another node)."""
    return getattr(node.target, "namespace", None) == "_c10d_functional" and node.target is not _WAIT


def order_collectives(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Sort the collectives of a backward graph by the joint graph's order."""
    report = PassReport()
    starts = [n for n in gm.graph.nodes if is_collective_start(n) or is_hooked(n)]
    report.matched = len(starts)
    if ctx.joint_order is None or len(starts) < 2:
        return report
    rank = {n: _rank(n, ctx.joint_order) for n in starts}
    wanted = sorted(starts, key=lambda n: rank[n])
    report.changed = sum(a is not b for a, b in zip(starts, wanted, strict=True))
    if report.changed:
        stable_sort(gm.graph, {later: first for first, later in itertools.pairwise(wanted)})
    return report


def _rank(start: fx.Node, order: JointOrder) -> tuple[int, int, int]:
    """The sort key of one collective: the place of it, or of its use, in the joint graph; what is repeated first."""
    if start.name in order.backward:
        return order.position[start.name], 1, 0
    first = len(order.position)
    seen: set[fx.Node] = set()
    todo = list(start.users)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name in order.gradients:
            first = min(first, order.position[node.name])
        else:
            todo += node.users
    # Several for one use: as they stood in the joint graph, where one may need another.
    return first, 0, order.position.get(start.name, first)
