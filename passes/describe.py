"""Say what was found for each weight group: its kind, its dtypes hop by hop, the bytes it sends. Pure.

gemm -> scratch -> wire -> sum -> main_grad        one dtype each; none may be below the rule's
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import NOTE, operator_of
from gtp_compile.passes.collective_ops import Layout
from gtp_compile.passes.gemm_forms import form_of
from gtp_compile.passes.insert_collectives import AccumulateNote, ReduceNote
from gtp_compile.passes.wgrad_patterns import Chain, find_chain, kind_of

__all__ = ["GroupInfo", "check_dtypes", "describe_groups", "describe_wire", "wire_bytes"]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One weight group in one graph.

    Attributes:
        inputs: positions of the members' shards among the graph's inputs, leader first.
        layout: where the parts live.
        kind: "gemm" (the gradient is a GEMM's), or "reduction" (norms, biases, embeddings).
        form: what computes the gradient, as the model wrote it ("picked", "mm + scatter"); "" if nothing known does.
        reason: why (part of) the gradient is not matched; "" where all of it is.
        gemm_dtype: what the GEMM (or reduction) writes; None if none is known.
        scratch_dtype: what reaches the anchor.
        wire_dtype, sum_dtype: what travels, and in what the ranks' gradients are summed (one and the same in a
            functional reduce-scatter); None where nothing travels (one rank).
        main_grad_dtype: the accumulator (of the first member that has one); None without one.
        rule_dtype: what the dtype rule asks for.
        full_shape: of what is reduced, `[*full]` or `[members that are not frozen, *full]`.
        member_ndim: number of dims of one member.
    """

    inputs: tuple[int, ...]
    layout: Layout
    kind: str
    form: str
    reason: str
    gemm_dtype: torch.dtype | None
    scratch_dtype: torch.dtype
    wire_dtype: torch.dtype | None
    sum_dtype: torch.dtype | None
    main_grad_dtype: torch.dtype | None
    rule_dtype: torch.dtype
    full_shape: tuple[int, ...]
    member_ndim: int

    @property
    def matched(self) -> bool:
        return not self.reason


def describe_groups(graph: fx.Graph) -> list[GroupInfo]:
    """Every weight group of a joint graph that still has its anchors; the wire's dtype is filled in later."""
    positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    anchors = [a for a in Finalize.find(graph) if a.node.users]
    uses = Counter(a.shards for a in anchors)
    return [_describe(a, positions, uses[a.shards]) for a in anchors]


def _describe(anchor: Finalize, positions: dict[fx.Node, int], uses: int) -> GroupInfo:
    chain = find_chain(anchor.grad, anchor.grad_dtype)
    sources = chain.gemms or chain.reductions
    main_grad = next((m for m in anchor.main_grads if m is not None), None)  # the leader may be frozen
    full_shape = list(anchor.grad.meta["val"].shape)
    if len(anchor.shards) > 1:
        full_shape[0] = len(anchor.node.users)  # nothing is sent for frozen members
    # A gradient that was cast only after it was rounded has widen in its chain's place.
    widened = [n for n in chain.operands if n.target is torch.ops.gtp.widen.default]
    reason = chain.reason or "; ".join(_widen_reason(n) for n in widened)
    if not reason and uses > 1:
        reason = f"its gradient is reduced {uses} times, since the results go elsewhere before they are summed"
    return GroupInfo(
        inputs=tuple(positions[s] for s in anchor.shards),
        layout=anchor.layout,
        kind="gemm" if chain.gemms or reason else "reduction",
        form=_form(chain),
        reason=reason,
        gemm_dtype=min((n.meta["val"].dtype for n in sources), key=lambda d: d.itemsize, default=None),
        scratch_dtype=anchor.grad.meta["val"].dtype,
        wire_dtype=None,
        sum_dtype=None,
        main_grad_dtype=None if main_grad is None else main_grad.meta["val"].dtype,
        rule_dtype=anchor.grad_dtype,
        full_shape=tuple(full_shape),
        member_ndim=anchor.shards[0].meta["val"].ndim,
    )


def _form(chain: Chain) -> str:
    forms = [form_of(gemm) for gemm in chain.gemms.values()] + [str(kind_of(n)) for n in chain.reductions]
    forms += ["reduce"] * bool(chain.rows)  # over one row
    return " + ".join(dict.fromkeys(forms))


def _widen_reason(node: fx.Node) -> str:
    source: Any = node.args[0]
    dtype = source.meta["val"].dtype
    return f"{source.name} ({operator_of(source)}) is no known form of a weight gradient; it arrives rounded to {dtype}"


def describe_wire(graph: fx.Graph, groups: list[GroupInfo]) -> list[GroupInfo]:
    """The groups with the dtypes of their collectives, read off the lowered graph."""
    dtypes = {n.meta[NOTE].inputs: n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get(NOTE), ReduceNote)}
    return [replace(g, wire_dtype=dtypes.get(g.inputs), sum_dtype=dtypes.get(g.inputs)) for g in groups]


def check_dtypes(graph: fx.Graph, groups: list[GroupInfo], retyped: bool) -> None:
    """Hold the chain gemm -> scratch -> wire -> sum -> accumulate against the rule.

    A lower hop is allowed only where the user switched `retype_wgrads` off (then it is reported), and at a GEMM that
    is not matched (then the run warns).

    Raises:
        RuntimeError: a hop below the rule; the message names it.
    """
    if retyped:
        for g in groups:
            hops = {"scratch": g.scratch_dtype, "wire": g.wire_dtype, "sum": g.sum_dtype}
            if g.matched:
                hops["gemm"] = g.gemm_dtype
            for hop, dtype in hops.items():
                if dtype is not None and dtype.itemsize < g.rule_dtype.itemsize:
                    raise RuntimeError(
                        f"weight group of inputs {g.inputs}: its {hop} has {dtype}, the rule asks for {g.rule_dtype}. "
                        "This is a fault of gtp_compile: please report it with the graphs of options={'debug_dir': ...}"
                    )
    for node in graph.nodes:
        if isinstance(node.meta.get(NOTE), AccumulateNote):
            total, main_grad = node.meta["val"].dtype, node.args[0].meta["val"].dtype
            if total.itemsize < main_grad.itemsize:
                raise RuntimeError(f"{node.name}: sums in {total} for a main_grad of {main_grad}")


def wire_bytes(info: GroupInfo) -> tuple[sympy.Expr, int]:
    """Bytes that one rank sends for the reduction of a group: as a formula, and for this graph's sizes.

    A ring reduce-scatter over W ranks sends (W - 1) / W of the (padded) buffer once; an all-reduce over R twice
    (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
    """
    layout, shape = info.layout, info.full_shape
    names = {1: ("N",), 2: ("N", "K"), 3: ("E", "N", "K")}.get(len(shape)) or tuple(f"d{i}" for i in range(len(shape)))
    sizes = list(sympy.symbols(names, positive=True, integer=True))
    values: dict[Any, int] = dict(zip(sizes, shape, strict=True))
    itemsize = (info.wire_dtype or info.scratch_dtype).itemsize
    formula: sympy.Expr = sympy.Integer(0)
    if layout.sharded:
        world = sympy.Symbol("W", positive=True, integer=True)
        values[world] = layout.shards
        dim = layout.dim + len(shape) - info.member_ndim
        sizes[dim] += sympy.Mod(-sizes[dim], world)
        formula += itemsize * math.prod(sizes) * (world - 1) / world
        sizes[dim] /= world
    replicas = layout.group_sizes[1:] if layout.sharded else layout.group_sizes
    for i, size in enumerate(replicas):
        ranks = sympy.Symbol("R" if len(replicas) == 1 else f"R{i}", positive=True, integer=True)
        values[ranks] = size
        formula += 2 * itemsize * math.prod(sizes) * (ranks - 1) / ranks
    return formula, int(formula.subs(values))
