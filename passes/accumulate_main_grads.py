"""Write the sums to main_grad, in place, in the backward graph.

Before:  main_grad f32[N/W, K], reduced f32[N/W, K] -> add -> output
After:   main_grad f32[N/W, K], reduced f32[N/W, K] -> add -> copy_(main_grad, .);  output None

Before:  main_grad f32[E, N, K]; dy, x, offs -> gtp.grouped_wgrad f32[E, N, K] -> add -> output
After:   main_grad f32[E, N, K]; dy, x, offs -> gtp.grouped_wgrad_add_(main_grad, .);  output None

1. Each `add(main_grad, reduced)` that the graph returns becomes a write. The parameter gets no gradient: it is in
   main_grad.
2. Where nothing travels between a GEMM of ours and main_grad (one rank, or a plain weight of
   `accumulate_into_main_grad`), the GEMM adds to it: its result, and two more passes over memory, fall away.

The first mutation of the pipeline, after the partition, so that everything before works on functional graphs.

Needs: insert_collectives, and a partition that saved main_grad itself. Leaves: a backward graph that mutates its
main_grad inputs and nothing else.
"""

from typing import Any

import torch
from torch import fx

from gtp_compile.passes.base import NOTE, PassContext, PassReport, outputs_of
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.gemm_forms import transposed
from gtp_compile.passes.insert_collectives import AccumulateNote

__all__ = ["accumulate_main_grads"]

aten = torch.ops.aten
gtp = torch.ops.gtp

_ADDING = {
    gtp.dense_wgrad.default: gtp.dense_wgrad_add_.default,
    gtp.grouped_wgrad.default: gtp.grouped_wgrad_add_.default,
}


def accumulate_main_grads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Replace each returned `add(main_grad, reduced)` by a write to main_grad."""
    report = PassReport()
    output = gm.graph.output_node()
    results = outputs_of(gm.graph)
    for i, node in enumerate(results):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get(NOTE), AccumulateNote):
            continue
        report.matched += 1
        main_grad, reduced = node.args
        assert isinstance(main_grad, fx.Node) and main_grad.op == "placeholder", (
            f"{node.format_node()}: main_grad is no input of the backward graph; the partitioner saved something else"
        )
        is_once = results.count(node) == 1  # a copy may be made twice
        if not (is_once and _add_in_gemm(gm.graph, main_grad, reduced, node)):
            with gm.graph.inserting_before(output):
                val = main_grad.meta["val"]
                insert_call(gm.graph, aten.copy_.default, (main_grad, node), like=node, val=val)
        results[i] = None
        report.changed += 1
    output.args = (tuple(results),)
    gm.graph.eliminate_dead_code()
    return report


def _add_in_gemm(graph: fx.Graph, main_grad: fx.Node, grad: Any, total: fx.Node) -> bool:
    """Let the GEMM that computes `grad` add it to main_grad; tells whether it can."""
    gemm = transposed(grad) or grad
    is_alone = len(main_grad.users) == len(grad.users) == len(gemm.users) == len(total.users) == 1
    dtypes = {main_grad.meta["val"].dtype, gemm.meta["val"].dtype}
    if gemm.target not in _ADDING or not is_alone or dtypes != {torch.float32}:
        return False
    dy, x, *offs, _ = gemm.args
    if gemm is not grad:
        dy, x = x, dy
    # Where the GEMM stands, so that its operands live no longer than before.
    with graph.inserting_before(gemm):
        insert_call(graph, _ADDING[gemm.target], (main_grad, dy, x, *offs), like=gemm)
    return True
