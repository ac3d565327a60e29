"""The nodes that run another tool's protocol hooks (`gtp_compile.hooked_ops`), as the passes see them."""

import torch
from torch import fx

__all__ = ["hooked_groups", "hooked_members", "is_hooked"]

_NAMES = frozenset({"gtp::hooked_linear", "gtp::hooked_dgrad", "gtp::hooked_wgrad"})


def is_hooked(node: fx.Node) -> bool:
    """Whether a node runs hooks, which may communicate. (By name: the ops are registered above the passes.)"""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _NAMES


def hooked_members(node: fx.Node) -> list[fx.Node]:
    """The weight group whose hooks a node runs, leader first."""
    schema = node.target._schema  # type: ignore[union-attr]
    index = [a.name for a in schema.arguments].index("members")
    members = node.args[index]
    assert isinstance(members, list | tuple), node.format_node()
    return list(members)  # type: ignore[arg-type]


def hooked_groups(graph: fx.Graph) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of each weight group that gets gradients: its members' positions among the graph's inputs, the compute dtype."""
    positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    wgrads = [n for n in graph.nodes if is_hooked(n) and n.target._schema.name == "gtp::hooked_wgrad"]
    return [(tuple(positions[m] for m in hooked_members(n)), n.args[0].meta["val"].dtype) for n in wgrads]
