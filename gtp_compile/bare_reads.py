"""Refuse graphs that multiply by another tool's distributed weight without asking its hooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gtp_compile.parameters import ComputeLeaf
from gtp_compile.weights import is_distributed_weight

__all__ = ["input_name", "real_input", "real_inputs", "refuse_bare_reads"]

_OPERATOR = type(torch.ops.aten.mm.default)

# What multiplies by a weight, by the name of the function or method in a Dynamo graph. Anything else (a norm, an
# optimizer's step in a graph of its own) may well mean the shard.
_MULTIPLIES = frozenset(
    {
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "grouped_mm", "bilinear",
        "embedding", "conv1d", "conv2d", "conv3d", "grouped_linear",
    }
)  # fmt: skip
_PASSES_ON = frozenset(
    {
        "t", "transpose", "permute", "view", "reshape", "contiguous", "to", "type", "float", "bfloat16", "half",
        "clone", "detach", "unsqueeze", "squeeze", "getitem", "stack", "cat", "type_as", "mT", "T",
    }
)  # fmt: skip


def refuse_bare_reads(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Look at each input that bears the protocol and isn't ours.

    Raises:
        ValueError: it is multiplied as it is: a shard in a full weight's place.
    """
    for node, weight in real_inputs(gm, example_inputs).items():
        if isinstance(weight, ComputeLeaf) or not is_distributed_weight(weight):
            continue
        user = _multiplied_by(node)
        if user is not None:
            raise ValueError(
                f"backend 'gtp': {input_name(node)}: a {type(weight).__name__} bears the distributed-weight protocol, "
                f"but {user.name} reads it without asking its hooks, so a shard would stand for the full weight; use "
                "gtp_compile.Linear (module.__class__ = gtp_compile.Linear; gtp_compile.shard does it for every "
                "torch.nn.Linear) or gtp_compile.GroupedLinear"
            )


def real_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The object behind each input of a Dynamo graph, by its placeholder, in order."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {node: real_input(node, x) for node, x in zip(placeholders, example_inputs, strict=False)}


def real_input(node: fx.Node, example: Any) -> Any:
    """The object behind an input: wrappers such as DistributedDataParallel's give fake tensors as examples."""
    return getattr(node.meta.get("grapharg"), "example", example)


def _multiplied_by(weight: fx.Node) -> fx.Node | None:
    todo, seen = [weight], set()
    while todo:
        node = todo.pop()
        for user in node.users:
            name = _called(user)
            if name in _MULTIPLIES:
                return user
            if name in _PASSES_ON and user not in seen:
                seen.add(user)
                todo.append(user)
    return None


def _called(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, _OPERATOR):
        return target._schema.name.split("::")[-1]
    if target is getattr and len(node.args) > 1:
        return str(node.args[1])
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def input_name(node: fx.Node) -> str:
    """The parameter as the user's code calls it, out of Dynamo's `L['self']._modules['up']._parameters['weight']`."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    text = name() if callable(name) else name
    keys = re.findall(r"\['?([^'\]]+)'?\]", str(text or ""))[1:]
    return ".".join(keys) or node.name
