"""Turn the wgrad GEMMs of a group into one grouped kernel.

Before:  dy bf16[R, N], x bf16[R, K], offs -> permute -> _grouped_mm -> bf16[E, N, K] -> finalize
After:   dy bf16[R, N], x bf16[R, K], offs -> gtp.grouped_wgrad      -> bf16[E, N, K] -> finalize

`retype_wgrads` has done it already where the dtype had to change, since torch's own grouped GEMM can't write another
dtype than its inputs'; this pass takes what is left (compute dtype kept, or retyping switched off). Our kernel
differs from torch's in what it promises: an expert without rows gets exact zeros, and rows past the last offset are
never read.

Needs: group_wgrads. Leaves: no `_grouped_mm` among the GEMMs that reach an anchor.
"""

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.wgrad_patterns import find_chain, transposed

__all__ = ["fuse_wgrads"]

aten = torch.ops.aten


def fuse_wgrads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Replace torch's grouped GEMM by ours in every chain that reaches a gradient anchor."""
    report = PassReport()
    graph = gm.graph
    for anchor in Finalize.find(graph):
        for gemm in find_chain(anchor.grad, anchor.grad_dtype).gemms:
            if gemm.target is not aten._grouped_mm.default:
                report.matched += gemm.target is torch.ops.gtp.grouped_wgrad.default
                continue
            a, b, offs = gemm.args[:3]
            with graph.inserting_before(gemm):
                dy = transposed(a) or insert_call(graph, aten.permute.default, (a, [1, 0]), like=gemm)  # type: ignore[arg-type]
                args = (dy, b, offs, gemm.meta["val"].dtype)
                fused = insert_call(graph, torch.ops.gtp.grouped_wgrad.default, args, like=gemm)
            gemm.replace_all_uses_with(fused)
            graph.erase_node(gemm)
            report.matched += 1
            report.changed += 1
    return report
