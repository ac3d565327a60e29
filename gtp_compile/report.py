"""Rows of `explain` and `verify`: one per weight group, with names; and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gtp_compile.parameters import ComputeLeaf
from gtp_compile.passes.collective_ops import Layout
from gtp_compile.passes.describe import GroupInfo, wire_bytes
from gtp_compile.session import Session
from gtp_compile.weights import is_distributed_weight, weight_grad_dtype

__all__ = ["Row", "hooked_rows", "rows_of", "split_rows", "table"]


@dataclass(slots=True)
class Row:
    """One weight group.

    Attributes:
        weights: qualified names, leader first.
        leader: the first of them.
        layout: e.g. "Shard(1) over 2 ranks".
        kind: "gemm", "reduction" (norms, biases, embeddings), or "eager" (in no compiled graph that trains).
        matched: whether all of the gradient was traced to its GEMMs or reductions.
        reason: why not ("" if matched).
        form: how the model wrote what computes the gradient: one of `passes/gemm_forms.py`, "reduce", "scatter", or
            "hooked" (another tool's weight).
        gemm_dtype, scratch_dtype, wire_dtype, sum_dtype, main_grad_dtype: the chain, e.g. "float32"; None where there
            is no such hop.
        wire_bytes, wire_formula: what each rank sends for the reduction, per use of the graph.
        error: relative Frobenius error of main_grad's change against float64 (`verify`; None if not measured).
    """

    weights: list[str]
    leader: str
    layout: str
    kind: str
    matched: bool
    reason: str
    form: str = ""
    gemm_dtype: str | None = None
    scratch_dtype: str | None = None
    wire_dtype: str | None = None
    sum_dtype: str | None = None
    main_grad_dtype: str | None = None
    wire_bytes: int = 0
    wire_formula: str = "0"
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(session: Session, leaves: Sequence[ComputeLeaf]) -> list[Row]:
    """One row per weight group, in the order of the model's parameters."""
    by_name = {leaf.fqn: leaf for leaf in leaves}
    rows: dict[str, Row] = {}
    for graph in session.graphs:
        for call in dict.fromkeys(graph.calls):
            for info in graph.groups:
                row = _row(info, [call[i] for i in info.inputs])
                known = rows.setdefault(row.leader, row)
                if known is not row:  # another use, in another graph
                    known.wire_bytes += row.wire_bytes
                    known.matched, known.reason = known.matched and row.matched, known.reason or row.reason
    seen = {name for row in rows.values() for name in row.weights}
    for leaf in leaves:
        if leaf.fqn not in seen:
            rows[leaf.fqn] = _unseen(leaf)
    order = {name: i for i, name in enumerate(by_name)}
    return sorted(rows.values(), key=lambda r: order.get(r.leader, len(order)))


def hooked_rows(session: Session, model: nn.Module) -> list[Row]:
    """One row per weight group that another tool distributes; its collectives are its own affair."""
    params = dict(model.named_parameters())
    rows: dict[str, Row] = {}
    for graph in session.graphs:
        for call in dict.fromkeys(graph.calls):
            for positions, compute_dtype in graph.hooked:
                names = [call[i] for i in positions]
                if all(name in params for name in names):  # not a copy that functional_call put in
                    rows[names[0]] = _hooked(names, [params[n] for n in names], compute_dtype)
    seen = {name for row in rows.values() for name in row.weights}
    for name, param in params.items():
        if is_distributed_weight(param) and name not in seen:
            reason = "in no compiled graph that trains; gtp_compile's GroupedLinear and Linear ask its hooks in eager"
            rows[name] = Row([name], name, f"{type(param).__name__}'s own", "eager", not param.requires_grad, reason)
    order = {name: i for i, name in enumerate(params)}
    return sorted(rows.values(), key=lambda r: order[r.leader])


def _hooked(names: list[str], members: list[nn.Parameter], compute_dtype: torch.dtype) -> Row:
    leader = members[0]
    dtype = _dtype(weight_grad_dtype(members, compute_dtype))
    main_grad = getattr(leader, "main_grad", None)
    owner = type(leader).__name__
    return Row(
        names, names[0], f"{owner}'s own", "gemm", True, f"reduced by finalize_group_grads of {owner}",
        form="hooked", gemm_dtype=dtype, scratch_dtype=dtype,
        main_grad_dtype=None if main_grad is None else _dtype_of(main_grad),
    )  # fmt: skip


def split_rows(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """GEMM groups, and the others (reductions, and what is in no compiled graph)."""
    rows = list(rows)
    return [r for r in rows if r.kind == "gemm"], [r for r in rows if r.kind != "gemm"]


def _row(info: GroupInfo, names: list[str]) -> Row:
    formula, value = wire_bytes(info)
    return Row(
        weights=names,
        leader=names[0],
        layout=_layout(info.layout),
        kind=info.kind,
        matched=info.matched,
        form=info.form,
        reason=info.reason,
        gemm_dtype=_dtype(info.gemm_dtype),
        scratch_dtype=_dtype(info.scratch_dtype),
        wire_dtype=_dtype(info.wire_dtype),
        sum_dtype=_dtype(info.sum_dtype),
        main_grad_dtype=_dtype(info.main_grad_dtype),
        wire_bytes=value,
        wire_formula=str(formula),
    )


def _unseen(leaf: ComputeLeaf) -> Row:
    reason = (
        "in no compiled graph that trains; where it is used in eager, its gradient is rounded as eager rounds it, "
        "then summed in main_grad's dtype"
        if leaf.requires_grad
        else "frozen: no gradient, no collective"
    )
    main_grad = leaf.main_grad
    return Row(
        [leaf.fqn], leaf.fqn, _layout(leaf.mesh_layout), "eager", not leaf.requires_grad, reason,
        main_grad_dtype=None if main_grad is None else _dtype_of(main_grad),
    )  # fmt: skip


def _dtype_of(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _layout(layout: Layout) -> str:
    where = f"Shard({layout.dim})" if layout.sharded else "Replicate()"
    sizes = " x ".join(map(str, layout.group_sizes))
    return f"{where} over {sizes} ranks, {layout.reduce_op}"


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", None: "-"}


def table(rows: Sequence[Row], errors: dict[str, Sequence[float | None]] | None = None) -> str:
    """The rows as text: name, layout, dtype of each hop, bytes on the wire, and columns of errors."""
    head = ["weight group", "layout", "gemm", "scratch", "wire", "sum", "main_grad", "wire bytes", *(errors or {}), ""]
    lines = [head]
    for i, r in enumerate(rows):
        more = f" (+{len(r.weights) - 1})" if len(r.weights) > 1 else ""
        hops = [r.gemm_dtype, r.scratch_dtype, r.wire_dtype, r.sum_dtype, r.main_grad_dtype]
        cells = [_SHORT.get(h, str(h)) for h in hops]
        shown = [_error(column[i]) for column in (errors or {}).values()]
        lines.append(
            [
                r.leader + more,
                r.layout.split(" over")[0],
                *cells,
                f"{r.wire_bytes:,}",
                *shown,
                r.form if r.matched and r.form else r.reason,
            ]
        )
    widths = [max(len(line[c]) for line in lines) for c in range(len(head))]
    right = set(range(7, len(head) - 1))
    text = [
        "  ".join(
            cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rule = "-" * min(120, max(len(t.rstrip()) for t in text))
    return "\n".join([text[0].rstrip(), rule, *(t.rstrip() for t in text[1:])])


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
