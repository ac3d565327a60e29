"""Put a graph's nodes into an order that respects data, and whatever else must come before."""

from collections.abc import Mapping

from torch import fx

__all__ = ["stable_sort"]


def stable_sort(graph: fx.Graph, after: Mapping[fx.Node, fx.Node] | None = None) -> None:
    """Restore definition before use, in place, changing the order no more than that takes.

    Args:
        graph: its placeholders must stand first.
        after: for some nodes another one that has to come before, without there being a use.

    Raises:
        RuntimeError: data and `after` together close a cycle; the message names a node on it.
    """
    after = after or {}
    placed: set[fx.Node] = set()
    open_: set[fx.Node] = set()  # its inputs are being placed
    order: list[fx.Node] = []
    for start in graph.nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if node in placed:
                stack.pop()
                continue
            missing = [a for a in node.all_input_nodes if a not in placed]
            if node in after and after[node] not in placed:
                missing.append(after[node])
            if missing:
                if node in open_:
                    raise RuntimeError(
                        f"{node.name}: must come before itself; there is no order for {node.format_node()}"
                    )
                open_.add(node)
                stack += reversed(missing)
            else:
                placed.add(node)
                order.append(stack.pop())
    cursor = order[0]
    for node in order[1:]:
        cursor.append(node)
        cursor = node
