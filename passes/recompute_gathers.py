"""Keep gathered weights out of what forward saves for backward: backward gathers them again from the shards.

Before:  forward saves t(gathered) bf16[K, N]
After:   forward saves the shard f32[N/W, K], an input that lives anyway; backward has its own all_gather

Every node of a gather, and every view or cast that depends on nothing else, is tagged MUST_RECOMPUTE: the partitioner
would otherwise save the view instead. By rule, not by cost, so that all ranks decide alike.

Needs: insert_collectives. Leaves: tags only.
"""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gtp_compile.passes.base import NOTE, PassContext, PassReport
from gtp_compile.passes.insert_collectives import GatherNote
from gtp_compile.passes.wgrad_patterns import kind_of

__all__ = ["recompute_gathers"]

# Not below any id of the user's own checkpoints, or the partitioner would save ours at the seam between two.
_AC_GRAPH_ID = 1 << 30


def recompute_gathers(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Tag the gathers, and what is made of a gathered weight alone, for recomputation."""
    report = PassReport()
    tagged: set[fx.Node] = set()
    for node in gm.graph.nodes:
        gather = isinstance(node.meta.get(NOTE), GatherNote)
        inputs = node.all_input_nodes
        derived = bool(inputs) and all(a in tagged for a in inputs) and kind_of(node) in ("view", "cast", "list")
        report.matched += gather
        if (gather or derived) and node.meta.get("partitioner_tag") != "is_backward":
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _AC_GRAPH_ID
            tagged.add(node)
            report.changed += 1
    return report
