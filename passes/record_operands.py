"""For `verify`: hand the operands of every weight gradient to the recorder of its leaf.

Before:  ... -> f32[N, K] -> finalize
After:   ... -> f32[N, K] -> gtp.record(., shard, [dy, x], program) -> finalize

A *program* is the gradient's chain as a graph of its own, from its operands to the anchor; `verify` runs it in
float64. Programs are kept in the pass context, so this pass only makes sense in graphs that are not cached.
"""

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.wgrad_patterns import Chain, find_chain

__all__ = ["record_operands"]


def record_operands(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Put a `gtp::record` before every gradient anchor."""
    report = PassReport()
    assert ctx.programs is not None, "recording needs somewhere to keep the programs"
    for anchor in Finalize.find(gm.graph):
        chain = find_chain(anchor.grad, anchor.grad_dtype)
        ctx.programs.append(_program(chain))
        with gm.graph.inserting_before(anchor.node):
            args = (anchor.grad, anchor.shards[0], list(dict.fromkeys(chain.operands)), len(ctx.programs) - 1)
            recorded = insert_call(gm.graph, torch.ops.gtp.record.default, args, like=anchor.node)
        anchor.node.update_arg(0, recorded)
        report.matched += 1
        report.changed += 1
    return report


def _program(chain: Chain) -> fx.Graph:
    program = fx.Graph()
    env = {n: program.placeholder(n.name) for n in dict.fromkeys(chain.operands)}
    for node in chain.nodes:
        inside = chain.gemms[node].inside if node in chain.gemms else []
        for n in (*inside, node):
            if n not in env:
                env[n] = program.node_copy(n, lambda a: env[a])
    program.output(env[chain.root])
    return program
