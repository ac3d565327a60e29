"""Write a computation once, and either run it or insert it into a graph.

The collectives of a weight are needed twice: as nodes (the compiled path) and as calls (a weight read outside a
compiled graph). Both come from the same function, which gets an `Emit` and never knows which of the two it is.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_iter, tree_map

__all__ = ["Emit", "GraphEmit", "RunEmit", "insert_call", "values"]


class Emit(Protocol):
    """Something that applies an operator and can tell the metadata of what it made."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply `target`, an OpOverload, and return its result (a tensor, or a node standing for one)."""

    def value(self, x: Any) -> torch.Tensor:
        """The tensor (real or fake) behind a result of this object."""


class RunEmit:
    """Apply operators at once (eager)."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x


class GraphEmit:
    """Insert operators into a graph, each with `meta["val"]`.

    Args:
        graph: the graph to insert into; the caller sets the insertion point.
        like: the node whose provenance (stack trace, module stack, backward tag) the new nodes carry.
    """

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self._graph = graph
        self._like = like
        self.nodes: list[fx.Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = insert_call(self._graph, target, args, kwargs, like=self._like)
        self.nodes.append(node)
        return node

    def value(self, x: fx.Node) -> torch.Tensor:
        return x.meta["val"]

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        with self._graph.inserting_before(node):
            yield


# What a new node inherits: where the user's code is, whose backward it belongs to, how the partitioner sees it.
_INHERITED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag", "original_aten")


def values(x: Any) -> Any:
    """`x` with every node replaced by its `meta["val"]`."""
    return tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, x)


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    val: Any = None,
) -> fx.Node:
    """Insert one call at the graph's insertion point, with true metadata.

    `meta["val"]` is computed by running `target` on the fake values of its arguments: a node without it breaks the
    partitioner and Inductor far from here. Where it is known (an in-place operator returns its argument), `val` saves
    the run.
    """
    kwargs = kwargs or {}
    node = graph.call_function(target, args, kwargs)
    if val is None:
        with _fake_mode_of(args, like):
            val = target(*values(args), **values(kwargs))
    node.meta["val"] = val
    for key in _INHERITED:
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def _fake_mode_of(args: tuple[Any, ...], like: fx.Node) -> Any:
    for leaf in itertools.chain(tree_iter(values(args)), tree_iter(like.meta.get("val"))):
        mode = getattr(leaf, "fake_mode", None)
        if mode is not None:
            return mode
    raise AssertionError(f"no fake tensor among the arguments of the node to insert beside {like.format_node()}")
