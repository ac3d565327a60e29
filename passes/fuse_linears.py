"""Give grouped GEMMs over rows to our kernel where it is the faster one.

Before:  weight bf16[E, N, K] -> permute -> _grouped_mm(x bf16[R, K], ., offs)
After:   weight bf16[E, N, K] -> gtp.grouped_linear(x, ., offs)

Forward and input gradients alike. Which is faster depends on the GPU and on the weight's sizes, never on the rows.

Needs: fuse_gathers, which knows more about gathered weights. Leaves: torch's GEMM where that is as good, or a skip with
the reason.
"""

import torch
from torch import fx

from gtp_compile.kernels.grouped_linear.choice import outruns_torch
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.gemm_forms import transposed
from gtp_compile.passes.rows_gemms import find_rows_gemm, replace_rows_gemm

__all__ = ["fuse_linears"]

aten = torch.ops.aten
gtp = torch.ops.gtp


def fuse_linears(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Rewrite torch's grouped GEMMs over rows that our kernel outruns."""
    report = PassReport()
    for node in gm.graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        gemm = find_rows_gemm(node)
        if gemm is None:
            continue
        report.matched += 1
        if not outruns_torch(gemm.x.meta["val"], gemm.stack.meta["val"].transpose(1, 2)):
            continue
        stack = transposed(gemm.stack)
        if stack is None:
            with gm.graph.inserting_before(node):
                stack = insert_call(gm.graph, aten.permute.default, (gemm.stack, [0, 2, 1]), like=node)
            stack.meta = {**node.meta, "val": stack.meta["val"]}  # with a checkpoint's tags
        reason = replace_rows_gemm(gm.graph, gemm, gtp.grouped_linear.default, stack, gemm.offs)
        if reason:
            report.skip(node, reason)
        else:
            report.changed += 1
    gm.graph.eliminate_dead_code()
    return report
