"""Graph invariants, checked between passes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from gtp_compile.passes.base import NOTE, outputs_of
from gtp_compile.passes.emit import values
from gtp_compile.passes.insert_collectives import GatherNote
from gtp_compile.passes.order_collectives import is_collective_start

__all__ = ["check_graph", "check_metadata", "check_saved", "wrong_metadata"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OPERATOR = type(_WAIT)


def check_graph(gm: fx.GraphModule, given: Collection[fx.Node] = ()) -> None:
    """Structure: the graph is sound, every new tensor has a value, every new collective exactly one wait.

    Args:
        gm: the graph behind a pass.
        given: the nodes it had before; they are torch's or the user's, who may have other rules.

    Raises:
        RuntimeError: the message names the node.
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in given:
            continue
        if "val" not in node.meta and node.target is not operator.getitem:
            raise RuntimeError(f"{node.format_node()}: has no meta['val']; insert nodes with passes.emit.insert_call")
        if is_collective_start(node):
            waits = [u for u in node.users if u.target is _WAIT]
            if len(waits) != 1 or len(node.users) != 1:
                raise RuntimeError(
                    f"{node.format_node()}: a collective needs exactly one wait as its only user, it has {len(waits)} "
                    f"among {len(node.users)} users"
                )


def check_metadata(gm: fx.GraphModule, given: Collection[fx.Node] = ()) -> Collection[fx.Node]:
    """Every node's recorded dtype and shape are those that its operator gives; returns those of `given` that are not.

    Args:
        gm: the graph behind a pass.
        given: nodes that were `wrong_metadata` before it.

    Raises:
        RuntimeError: the message names the node, what is recorded and what the operator gives.
    """
    wrong = wrong_metadata(gm)
    for node, text in wrong.items():
        if node not in given:
            raise RuntimeError(text)
    return wrong


def wrong_metadata(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """What the operators of `gm`, run on the fake values of their inputs, give otherwise than recorded, by node.

    Torch's own patterns leave such behind them: 2.11 turns `scatter` of a number into an int64 `where`, and records no
    new dtype for what reads it.
    """
    wrong = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, _OPERATOR):
            continue
        want = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        if not want or want[0].__class__.__name__ != "FakeTensor":
            continue
        if any("val" not in a.meta for a in node.all_input_nodes):  # torch's own (2.14: random state of a checkpoint)
            continue
        with want[0].fake_mode:  # type: ignore[attr-defined]
            result: Any = node.target(*values(node.args), **values(node.kwargs))
        got = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]
        for w, g in zip(want, got, strict=True):
            if w.dtype != g.dtype or tuple(w.shape) != tuple(g.shape):
                wrong[node] = (
                    f"{node.format_node()}: meta['val'] says {w.dtype} {tuple(w.shape)}, the operator gives "
                    f"{g.dtype} {tuple(g.shape)}"
                )
    return wrong


def check_saved(forward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Nothing that forward saves for backward may be a gathered weight, or made of one alone.

    Raises:
        RuntimeError: the message names the saved value.
    """
    gathered: set[fx.Node] = set()
    for node in forward.graph.nodes:
        inputs = node.all_input_nodes
        alone = bool(inputs) and node.op == "call_function" and all(a in gathered for a in inputs)
        if isinstance(node.meta.get(NOTE), GatherNote) or alone:
            gathered.add(node)
    for node in outputs_of(forward.graph)[num_fwd_outputs:]:
        if node in gathered:
            raise RuntimeError(f"{node.name}: forward would keep a gathered weight alive until backward")
