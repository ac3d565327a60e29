"""Keep gathered weights out of what forward saves for backward: backward gathers them again from the shards.

Before:  forward saves t(gathered) bf16[K, N]
After:   forward saves the shard f32[N/W, K], an input that lives anyway; backward has its own all_gather

1. Every node of a gather, and whatever depends on nothing else, is tagged MUST_RECOMPUTE: the partitioner would
   otherwise save a view of it instead.
2. What is made of a gathered weight and an activation is tagged MUST_SAVE (which means: not to be recomputed), unless
   the user's own checkpoint has a say. Recomputing it would bring a gather into backward.
3. So is what is made of a checkpoint's results outside it. And what backward computes of recomputed values alone (a
   derivative, before the gradient comes in) is recomputed, too. The partitioner would rather save it where it is small
   or empty, and that rank would recompute, and gather, less.
4. Linears that run another tool's hooks are saved like 2, since backward has hooks of its own; and their weights go to
   backward as the very objects that bear the hooks (a saved-tensor hook would hand over a copy).

By rule, not by cost: the partitioner weighs sizes, ranks differ in their token counts, and all of them must issue the
same collectives.

Needs: insert_collectives. Leaves: tags only.
"""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gtp_compile.passes.base import NOTE, PassContext, PassReport
from gtp_compile.passes.hooked import hooked_members, is_hooked
from gtp_compile.passes.insert_collectives import GatherNote
from gtp_compile.passes.order_collectives import is_collective_start, is_tangent

__all__ = ["recompute_gathers"]

# Not below any id of the user's own checkpoints, or the partitioner would save ours at the seam between two.
_AC_GRAPH_ID = 1 << 30


def recompute_gathers(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Tag the gathers, and what is made of gathered weights, so that all ranks recompute alike."""
    report = PassReport()
    gathered: set[fx.Node] = set()  # of a gather, or made of one alone
    travelled: set[fx.Node] = set()  # those that a collective stands behind
    backward: set[fx.Node] = set()  # what depends on a tangent, or was made for backward
    tangents: set[fx.Node] = set()  # what depends on a tangent
    for node in gm.graph.nodes:
        if is_hooked(node):
            _keep_identity(node)
        if any(a in backward for a in node.all_input_nodes) or _belongs_to_backward(node):
            backward.add(node)
            if is_tangent(node) or any(a in tangents for a in node.all_input_nodes):
                tangents.add(node)
            else:
                report.changed += _recompute_like_its_inputs(node)
            continue
        is_gather = isinstance(node.meta.get(NOTE), GatherNote)
        report.matched += is_gather
        inputs = node.all_input_nodes
        if is_gather or (inputs and node.op == "call_function" and all(a in gathered for a in inputs)):
            gathered.add(node)
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
            report.changed += 1
        if (is_gather and is_collective_start(node)) or (node in gathered and any(a in travelled for a in inputs)):
            travelled.add(node)
        elif "recompute" not in node.meta and (is_hooked(node) or _uses(node, travelled) or _leaves_checkpoint(node)):
            _tag(node, CheckpointPolicy.MUST_SAVE)
    return report


def _uses(node: fx.Node, gathered: set[fx.Node]) -> bool:
    return node.op == "call_function" and any(a in gathered for a in node.all_input_nodes)


def _belongs_to_backward(node: fx.Node) -> bool:
    """Whether a node was traced in backward, or is a gradient that comes in."""
    return is_tangent(node) or node.meta.get("partitioner_tag") == "is_backward"


def _leaves_checkpoint(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(_checkpoints(node))


def _recompute_like_its_inputs(node: fx.Node) -> bool:
    """Tag a node of backward that reads what a checkpoint of the user's recomputes."""
    if not (ids := _checkpoints(node)) or node.op != "call_function":
        return False
    # With an id above an input's the partitioner would save that input, at the seam.
    _tag(node, CheckpointPolicy.MUST_RECOMPUTE, min(ids))
    return True


def _checkpoints(node: fx.Node) -> list[int]:
    """The ids of the user's checkpoints that recompute what a node reads."""
    policies = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    ids = [a.meta["ac_graph_id"] for a in node.all_input_nodes if a.meta.get("recompute") in policies]
    return [i for i in ids if i != _AC_GRAPH_ID]


def _keep_identity(node: fx.Node) -> None:
    for member in hooked_members(node):
        member.meta["saved_tensor_with_no_vc_check"] = True


def _tag(node: fx.Node, policy: CheckpointPolicy, ac_graph_id: int = _AC_GRAPH_ID) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = ac_graph_id
