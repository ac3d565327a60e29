"""Let grouped GEMMs read a gathered weight in the order in which the ranks' parts arrive.

Before:  all_gather -> wait -> view bf16[W, E, N/W, K] -> permute, clone, view bf16[E, N, K] -> permute -> _grouped_mm
After:   all_gather -> wait -> view bf16[W, E, N/W, K] -> gtp.grouped_linear_parts

Joining the parts of a stack of experts is a copy of the whole weight, in forward and again in backward.

1. For each gathered stack [E, N, K] or [E, K, N] that was joined along another dim than the experts', its parts.
2. Each grouped GEMM over rows (torch's or ours) that multiplies with the stack, or with its transpose: rewritten to
   read the parts. A GEMM whose kernel would be a slower one there stays: a skip, with the reason.
3. The copy goes where nothing reads it any more; other uses of the weight keep it.

Needs: insert_collectives. Leaves: no copy behind a gather that grouped GEMMs alone read, or a skip with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gtp_compile.kernels.grouped_linear.choice import why_not_in_parts
from gtp_compile.passes.base import NOTE, PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.gemm_forms import transposed
from gtp_compile.passes.insert_collectives import GatherNote
from gtp_compile.passes.rows_gemms import RowsGemm, find_rows_gemm, replace_rows_gemm

__all__ = ["fuse_gathers"]

aten = torch.ops.aten
gtp = torch.ops.gtp
c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Joined:
    """A stack of experts [E, N, K] that was joined from gathered parts.

    Attributes:
        node: the stack.
        parts: [W, E, c, K] (dim 1) or [W, E, N, c] (dim 2), a view of what arrived.
        dim: along which dim of the stack the parts lie.
    """

    node: fx.Node
    parts: fx.Node
    dim: int

    @property
    def size(self) -> int:
        """Of that dim, without padding."""
        return self.node.meta["val"].shape[self.dim]


def fuse_gathers(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Rewrite the grouped GEMMs over rows that multiply with a gathered stack of experts."""
    report = PassReport()
    for node in list(gm.graph.nodes):
        if (joined := _joined(node)) is None:
            continue
        for gemm, is_transposed in _gemms(node, False):
            report.matched += 1
            reason = _rewrite(gm.graph, gemm, joined, is_transposed)
            if reason:
                report.skip(gemm.node, reason)
            else:
                report.changed += 1
    gm.graph.eliminate_dead_code()
    return report


def _joined(node: fx.Node) -> Joined | None:
    """`node` as what `emit_gather` leaves of a stack of experts: a view, behind it a cut and a copy where padded."""
    if not isinstance(node.meta.get(NOTE), GatherNote) or node.meta["val"].ndim != 3:
        return None
    merged = node
    if merged.target is aten.clone.default and _source(merged).target is aten.slice.Tensor:
        merged = _source(merged)
    if merged.target is aten.slice.Tensor:
        merged = _source(merged)
    chain = [merged]
    for target in (aten.view.default, aten.clone.default, aten.permute.default, aten.view.default):
        if chain[-1].target is not target:
            return None
        chain.append(_source(chain[-1]))
    _, _, permute, parts, wait = chain
    if wait.target is not c10d.wait_tensor.default or _is_cut_later(node):
        return None
    order: Any = permute.args[1]
    return Joined(node, parts, order.index(0))


def _is_cut_later(node: fx.Node) -> bool:
    """Whether a gather goes on behind `node`, which has padding still."""
    return any(isinstance(user.meta.get(NOTE), GatherNote) for user in node.users)


def _source(node: fx.Node) -> Any:
    return node.args[0]


def _gemms(node: fx.Node, is_transposed: bool) -> Iterator[tuple[RowsGemm, bool]]:
    """Every grouped GEMM over rows that multiplies with a stack, and whether with `x @ stack[e]`, not its transpose."""
    for user in list(node.users):
        if transposed(user) is node:
            yield from _gemms(user, not is_transposed)
        elif (gemm := find_rows_gemm(user)) and gemm.stack is node:
            yield gemm, is_transposed != gemm.is_by_columns


def _rewrite(graph: fx.Graph, gemm: RowsGemm, joined: Joined, is_transposed: bool) -> str:
    """Let one GEMM read the parts; returns why it can't, or ""."""
    parts, dim = joined.parts, joined.dim
    if is_transposed:
        with graph.inserting_before(gemm.node):
            parts = insert_call(graph, aten.permute.default, (parts, [0, 1, 3, 2]), like=gemm.node)
        dim = 3 - dim
    if reason := why_not_in_parts(gemm.x.meta["val"], parts.meta["val"], dim):
        return reason
    args = (parts, gemm.offs, dim, joined.size)
    return replace_rows_gemm(graph, gemm, gtp.grouped_linear_parts.default, *args)
