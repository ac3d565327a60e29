"""Grouped GEMMs over rows, `x [R, K] @ stack [E, K, N]`: fprop and dgrad of experts, by torch or by us. Pure."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gtp_compile.passes.emit import insert_call

__all__ = ["RowsGemm", "find_rows_gemm", "replace_rows_gemm"]

aten = torch.ops.aten
gtp = torch.ops.gtp


@dataclass(frozen=True, slots=True)
class RowsGemm:
    """One of them.

    Attributes:
        node: its result [R, N].
        x: the rows [R, K].
        stack: what each expert multiplies with: [E, N, K], or [E, K, N] where `is_by_columns`.
        offs: cumulative row ends, i32[E].
    """

    node: fx.Node
    x: fx.Node
    stack: fx.Node
    offs: fx.Node
    is_by_columns: bool


def find_rows_gemm(node: fx.Node) -> RowsGemm | None:
    """What a node multiplies, if it is such a GEMM and nothing more (no bias, no other dtype)."""
    if node.target is gtp.grouped_linear.default:
        x, stack, offs = node.args
        return RowsGemm(node, x, stack, offs, False)  # type: ignore[arg-type]
    if node.target is not aten._grouped_mm.default:
        return None
    given = dict(zip(("x", "stack", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
    x, stack, offs = given["x"], given["stack"], given.get("offs")
    ndims = [a.meta["val"].ndim for a in (x, stack)]  # type: ignore[union-attr]
    is_bare = given.get("bias") is None and given.get("out_dtype") is None
    return RowsGemm(node, x, stack, offs, True) if offs is not None and ndims == [2, 3] and is_bare else None  # type: ignore[arg-type]


def replace_rows_gemm(graph: fx.Graph, gemm: RowsGemm, target: Any, *args: Any) -> str:
    """Put `target(x, *args)`, which computes the same, in a GEMM's place; returns why that can't be, or ""."""
    node = gemm.node
    with graph.inserting_before(node):
        new = insert_call(graph, target, (gemm.x, *args), like=node)
    if new.meta["val"].stride() != node.meta["val"].stride():
        graph.erase_node(new)
        return "torch pads the rows of its result"  # and views behind it are traced so
    # A checkpoint's tags, too: it is the same step of the model.
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return ""
