"""Pair each gradient anchor with its weight group, and bring the uses of one weight together.

Before: a weight used twice has two anchors, whose results are added after their reductions.

    dy1, x1 -> mm -> bf16[N, K] -> finalize -> getitem \\
                                                         add -> output
    dy2, x2 -> mm -> bf16[N, K] -> finalize -> getitem /

After: one anchor, so one reduction; the sum comes before it, where the next pass can type it.

    dy1, x1 -> mm \\
                    add -> bf16[N, K] -> finalize -> getitem -> output
    dy2, x2 -> mm /

1. Materializations of one group with equal arguments become one.
2. Gradient anchors of one group whose results are summed become one.
3. For each anchor, whether its gradient can be traced to GEMMs or reductions; if not, a skip with the reason.

Needs: a functional joint graph. Leaves: at most one gradient anchor a weight group, or a skip with the reason.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.ordering import stable_sort
from gtp_compile.passes.wgrad_patterns import find_chain

__all__ = ["group_wgrads"]

aten = torch.ops.aten
prims = torch.ops.prims


def group_wgrads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Bring the uses of one weight together, and say of each gradient anchor whether its GEMMs are found."""
    report = PassReport()
    graph = gm.graph
    report.changed += _merge_gathers(graph)
    for uses in _by_group(Finalize.find(graph)):
        if len(uses) > 1:
            reason = _merge_uses(graph, uses)
            if reason:
                report.skip(uses[0].node, reason)
            else:
                report.changed += 1
    for anchor in Finalize.find(graph):
        report.matched += 1
        reason = find_chain(anchor.grad, anchor.grad_dtype).reason
        if reason:
            report.skip(anchor.node, reason)
    return report


def _merge_gathers(graph: fx.Graph) -> int:
    seen: dict[object, fx.Node] = {}
    merged = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.gtp.materialize.default):
        key = tuple(tuple(a) if isinstance(a, list | tuple) else a for a in node.args)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged += 1
    return merged


def _by_group(anchors: Sequence[Finalize]) -> list[list[Finalize]]:
    groups: dict[object, list[Finalize]] = {}
    for a in anchors:
        groups.setdefault((a.shards, a.layout, a.grad_dtype), []).append(a)
    return list(groups.values())


def _merge_uses(graph: fx.Graph, uses: list[Finalize]) -> str:
    """Make the last anchor take the sum of all gradients. Returns why it can't be done ("" if it was)."""
    first, *others = uses
    # In a sum of results, a later anchor's term is dropped: the first one's term then stands for all.
    results = [result for anchor in others for result in anchor.node.users]
    terms = [_summand(result) for result in results]
    for result, term in zip(results, terms, strict=True):
        users = list(term.users)
        if len(users) != 1 or users[0].target is not aten.add.Tensor or result.target is not operator.getitem:
            return f"{result.args[0]}: is used other than in the sum of its weight's gradients"
    if {a.grad.meta["val"].dtype for a in uses} != {first.grad.meta["val"].dtype}:
        return f"{first.node.name}: the uses of its weight compute in different dtypes"
    total = first.grad
    with graph.inserting_before(others[-1].node):
        for anchor in others:
            total = insert_call(graph, aten.add.Tensor, (total, anchor.grad), like=anchor.node)
    first.node.update_arg(0, total)
    for result, term in zip(results, terms, strict=True):
        (add,) = term.users
        kept = add.args[1] if add.args[0] is term else add.args[0]
        add.replace_all_uses_with(kept)  # type: ignore[arg-type]
        graph.erase_node(add)
        graph.erase_node(term)
        if term is not result:
            graph.erase_node(result)
    for anchor in others:
        graph.erase_node(anchor.node)
    stable_sort(graph)
    return ""


def _summand(result: fx.Node) -> fx.Node:
    """What of a result is summed: for 16-bit shards autograd casts each use to their dtype first."""
    users = list(result.users)
    return users[0] if len(users) == 1 and users[0].target is prims.convert_element_type.default else result
