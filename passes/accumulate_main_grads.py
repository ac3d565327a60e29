"""Write the sums to main_grad, in place, in the backward graph.

Before:  main_grad f32[N/W, K], reduced f32[N/W, K] -> add -> output
After:   main_grad f32[N/W, K], reduced f32[N/W, K] -> add -> copy_(main_grad, .);  output None

The first mutation of the pipeline, after the partition, so that everything before works on functional graphs. The
parameter gets no gradient: it is in main_grad.

Needs: insert_collectives, and a partition that saved main_grad itself. Leaves: a backward graph that mutates its
main_grad inputs and nothing else.
"""

import torch
from torch import fx

from gtp_compile.passes.base import NOTE, PassContext, PassReport, outputs_of
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.insert_collectives import AccumulateNote

__all__ = ["accumulate_main_grads"]


def accumulate_main_grads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Replace each returned `add(main_grad, reduced)` by a write to main_grad."""
    report = PassReport()
    output = gm.graph.output_node()
    results = outputs_of(gm.graph)
    for i, node in enumerate(results):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get(NOTE), AccumulateNote):
            continue
        report.matched += 1
        main_grad = node.args[0]
        assert isinstance(main_grad, fx.Node) and main_grad.op == "placeholder", (
            f"{node.format_node()}: main_grad is no input of the backward graph; the partitioner saved something else"
        )
        with gm.graph.inserting_before(output):
            val = main_grad.meta["val"]
            insert_call(gm.graph, torch.ops.aten.copy_.default, (main_grad, node), like=node, val=val)
        results[i] = None
        report.changed += 1
    output.args = (tuple(results),)
    return report
