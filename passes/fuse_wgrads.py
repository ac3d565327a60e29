"""Give the wgrad GEMMs to our kernels where that is less work, whatever their dtype.

Before:  dy bf16[R, N], x bf16[R, K], offs -> permute -> _grouped_mm -> bf16[E, N, K] -> finalize
After:   dy bf16[R, N], x bf16[R, K], offs -> gtp.grouped_wgrad      -> bf16[E, N, K] -> finalize

`retype_wgrads` has done it already where the dtype had to change; this pass takes what is left (compute dtype kept, or
retyping switched off) of the forms that are marked `is_fused`: torch's grouped GEMM (in ours an expert without rows
gets exact zeros, and rows past the last offset are never read), sums over a batch of matrices, and a matrix for each
row that is scattered (`gemm_forms`).

Needs: group_wgrads. Leaves: none of these forms among the GEMMs that reach an anchor.
"""

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.gemm_forms import write_gemm
from gtp_compile.passes.wgrad_patterns import find_chain

__all__ = ["fuse_wgrads"]


def fuse_wgrads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Write our op for every GEMM of such a form that reaches a gradient anchor."""
    report = PassReport()
    graph = gm.graph
    for anchor in Finalize.find(graph):
        for node, gemm in find_chain(anchor.grad, anchor.grad_dtype).gemms.items():
            if not gemm.form.is_fused:
                report.matched += node.target is torch.ops.gtp.grouped_wgrad.default
                continue
            with graph.inserting_before(node):
                fused = write_gemm(graph, gemm, node.meta["val"].dtype)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            report.matched += 1
            report.changed += 1
    return report
