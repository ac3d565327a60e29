"""Lower the anchors: a materialization to an all-gather, a gradient anchor to a reduce-scatter.

Before:  shard f32[n, K] -> materialize -> bf16[N, K] -> mm ...
         ... -> f32[N, K] -> finalize -> getitem -> output
After:   shard f32[N/W, K] -> convert -> bf16[N/W, K] -> all_gather -> wait -> bf16[N, K] -> mm ...
         ... -> f32[N, K] -> reduce_scatter -> wait -> f32[N/W, K] -> add(main_grad, .) -> output

1. Dead anchors go first: a dead gather and its wait would stay in the graph for ever.
2. Each materialization becomes its gather (replicated weights: a cast), noted as `GatherNote`.
3. Each gradient anchor becomes one reduction for all members whose gradient is wanted, in the dtype the gradient has.
   Where it comes straight from our grouped GEMM, that stores it in the order in which the ranks' parts travel:
   `grouped_wgrad [E, N, K] -> view, permute, clone` becomes `grouped_wgrad_parts [W, E, N/W, K]`.
4. A member with a main_grad gets `add(main_grad, reduced)` in its gradient's place, noted as `AccumulateNote`; the
   mutation itself waits until there is a backward graph (`accumulate_main_grads`).

Needs: retype_wgrads, or a gradient is summed in the dtype it happens to have. Leaves: no anchor; each collective with
its wait.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize, Materialize
from gtp_compile.passes.base import NOTE, PassContext, PassReport
from gtp_compile.passes.collective_ops import (
    Layout,
    emit_cast,
    emit_gather,
    emit_pack,
    emit_reduce,
    emit_stack,
    emit_unstack,
)
from gtp_compile.passes.emit import Emit, GraphEmit, insert_call
from gtp_compile.passes.gemm_forms import GemmNote, transposed

__all__ = ["AccumulateNote", "GatherNote", "ReduceNote", "insert_collectives"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
gtp = torch.ops.gtp


@dataclass(frozen=True, slots=True)
class GatherNote:
    """On the nodes of a gather: made from a shard alone, never to be saved for backward."""


@dataclass(frozen=True, slots=True)
class AccumulateNote:
    """On `add(main_grad, reduced)`: stands where a gradient was returned; to be written to main_grad in place."""


@dataclass(frozen=True, slots=True)
class ReduceNote:
    """On the collective that sums a group's gradients over ranks."""

    inputs: tuple[int, ...]


def insert_collectives(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Replace every anchor by the collectives it stands for."""
    report = PassReport()
    graph = gm.graph
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=torch.ops.gtp.materialize.default):
        _lower_materialize(graph, Materialize.of(node))
        report.matched += 1
        report.changed += 1
    positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    sums: dict[fx.Node, fx.Node] = {}
    for anchor in Finalize.find(graph):
        sums |= _lower_finalize(graph, anchor, positions)
        report.matched += 1
        report.changed += 1
    # At once: each change of the output node costs a walk over all that the graph returns.
    output = graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: sums.get(node, node))
    graph.eliminate_dead_code()  # the anchors; once, since each time costs a walk over the whole graph
    return report


def _lower_materialize(graph: fx.Graph, anchor: Materialize) -> None:
    emit = GraphEmit(graph, anchor.node)
    with emit.before(anchor.node):
        full = emit_gather(emit, anchor.shards, anchor.layout, anchor.param_dtype)
    for node in emit.nodes:
        node.meta[NOTE] = GatherNote()
    anchor.node.replace_all_uses_with(full)
    graph.erase_node(anchor.node)


def _lower_finalize(graph: fx.Graph, anchor: Finalize, positions: dict[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Emit the reduction; returns what the graph is to return instead of what, for members with a main_grad."""
    sums = {}
    wanted = {int(user.args[1]): user for user in anchor.node.users}  # type: ignore[arg-type]
    assert all(u.target is operator.getitem for u in wanted.values()), anchor.node.format_node()
    members = sorted(wanted)
    emit = GraphEmit(graph, anchor.node)
    with emit.before(anchor.node):
        grad = anchor.grad
        if len(anchor.shards) > 1 and len(members) < len(anchor.shards):  # some members are frozen
            grad = emit_stack(emit, emit_unstack(emit, grad, members))
        # The wire has the dtype that retype_wgrads gave the gradient; what the rule asks is checked after this pass.
        shards = [anchor.shards[i] for i in members]
        reduced = emit_reduce(emit, grad, shards, anchor.layout, grad.meta["val"].dtype, _pack_in_gemm)
        inputs = tuple(positions[s] for s in anchor.shards)
        for node in emit.nodes:
            if node.target in (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default):
                node.meta[NOTE] = ReduceNote(inputs)
        for i, part in zip(members, reduced, strict=True):
            item, main_grad = wanted[i], anchor.main_grads[i]
            end = _gradient_output(item)
            if main_grad is None or end is None:
                item.replace_all_uses_with(emit_cast(emit, part, item.meta["val"].dtype))
            else:
                total = insert_call(graph, aten.add.Tensor, (main_grad, part), like=anchor.node)
                total.meta[NOTE] = AccumulateNote()
                sums[end] = total
                # The accumulator changes between forward and backward by design, also under saved-tensor hooks.
                main_grad.meta["saved_tensor_with_no_vc_check"] = True
    return sums


def _pack_in_gemm(emit: Emit, grad: fx.Node, dim: int, layout: Layout) -> Any:
    """`emit_pack`, but a grouped wgrad that nothing else reads is computed in that order, which saves the copy."""
    gemm = transposed(grad) or grad
    is_alone = len(grad.users) == len(gemm.users) == 1
    if gemm.target is not gtp.grouped_wgrad.default or not is_alone or dim == 0:
        return emit_pack(emit, grad, dim, layout)
    dy, x, offs, dtype = gemm.args
    if gemm is not grad:  # the stack is kept as [E, K, N]
        dy, x = x, dy
    parts = emit(gtp.grouped_wgrad_parts.default, dy, x, offs, dtype, dim, layout.shards)
    if isinstance(gemm.meta.get(NOTE), GemmNote):
        parts.meta[NOTE] = gemm.meta[NOTE]
    ranks, experts, *rest = emit.value(parts).shape
    return emit(aten.view.default, parts, [ranks * experts, *rest])


def _gradient_output(item: fx.Node) -> fx.Node | None:
    """The node that the graph returns for this gradient: `item`, or a cast of it to the leaf's dtype.

    None where something else happens to it on the way out; then it is returned, and the leaf's hook takes it.
    """
    node = item
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op == "output":
            return node
        if user.target not in (torch.ops.prims.convert_element_type.default, aten._to_copy.default):
            return None
        node = user
    return None
