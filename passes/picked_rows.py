"""Rows of which each picked its expert (`weight[ids]`), sorted by expert for a grouped GEMM, and back. On the device.

ids i64[S] -> sort -> order i64[S], searchsorted -> offs i32[E]
x [S, C, K] -> index(order) -> [S * C, K] -> grouped GEMM with offs * C
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gtp_compile.passes.emit import Emit

__all__ = ["pick_rows", "put_rows_back", "sort_by_expert", "times_rows"]

aten = torch.ops.aten
prims = torch.ops.prims


def sort_by_expert(emit: Emit, ids: fx.Node, experts: int) -> tuple[Any, Any]:
    """The order that sorts `ids`, and where each expert's end: `(i64[S], i32[E])`. Ids past the last are behind all."""
    flat: Any = ids if ids.meta["val"].ndim == 1 else emit(aten.reshape.default, ids, [-1])
    # An index below zero counts from the end.
    from_end = emit(aten.add.Tensor, flat, experts)
    flat = emit(aten.where.self, emit(aten.lt.Scalar, flat, 0), from_end, flat)
    pair = emit(aten.sort.stable, flat, stable=True)
    value = emit.value(flat)
    each = emit(
        prims.iota.default, experts, start=0, step=1, dtype=value.dtype, device=value.device, requires_grad=False
    )
    ends = emit(aten.searchsorted.Tensor, emit(operator.getitem, pair, 0), each, out_int32=True, right=True)
    return emit(operator.getitem, pair, 1), ends


def times_rows(emit: Emit, offs: Any, x: fx.Node) -> Any:
    """Offsets of rows, from those of the batch of `x [B, C, K]`."""
    if statically_known_true(x.meta["val"].shape[1] == 1):
        return offs
    return emit(aten.mul.Tensor, offs, _size(emit, x, 1))


def pick_rows(emit: Emit, x: Any, order: Any) -> Any:
    """`x [B, C, K]` in another order of its batch, as rows `[B * C, K]`."""
    return emit(aten.reshape.default, emit(aten.index.Tensor, x, [order]), [-1, emit.value(x).shape[-1]])


def put_rows_back(emit: Emit, rows: Any, order: Any, like: fx.Node) -> Any:
    """Undo `pick_rows`: `[B * C, N]` as `[B, C, N]` in the order of `like [B, C, K]`."""
    batch, count = (_size(emit, like, dim) for dim in (0, 1))
    rows = emit(aten.view.default, rows, [batch, count, emit.value(rows).shape[-1]])
    # Every row is written, so what they are written into does not count.
    return emit(aten.index_put.default, rows, [order], rows)


def _size(emit: Emit, x: fx.Node, dim: int) -> Any:
    size = x.meta["val"].shape[dim]
    return size if isinstance(size, int) else emit(aten.sym_size.int, x, dim)
