"""recompute_gathers: forward saves shards, backward gathers again."""

import re

import pytest
import torch
import torch.nn.functional as F
from tiny_models import IN, OUT, behind, nodes, ops, partitioned
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import gtp_compile
from gtp_compile.passes.base import NOTE
from gtp_compile.passes.insert_collectives import GatherNote
from gtp_compile.session import Session
from gtp_compile.testing import compare_numerics, fake_mesh
from gtp_compile.watched import run_watched

c10d = torch.ops._c10d_functional
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads", "insert_collectives")
MODELS = ["dense", "experts", "experts_transposed", "grouped", "leader_only_torch", "blocks", "checkpointed", "tied"]


def is_tagged(node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def saved(name: str, without: tuple[str, ...] = ()) -> list[torch.fx.Node]:
    forward, _, num_fwd_outputs = partitioned(name, without=without)
    return [n for n in forward.graph.output_node().args[0][num_fwd_outputs:] if n is not None]


# Rewrites (tags).


def test_a_gather_and_its_views_are_tagged():
    graph = behind("dense", *BEFORE)
    assert not any(is_tagged(n) for n in graph.module.graph.nodes)
    done = graph.run("recompute_gathers")
    tagged = [str(n.target) for n in graph.module.graph.nodes if is_tagged(n)]
    assert tagged == [
        "prims.convert_element_type.default",
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
        "aten.permute.default",  # the user's, of the gathered weight alone
    ]
    assert (done.report.matched, done.report.changed) == (3, 4)


@pytest.mark.parametrize("name", MODELS)
def test_only_shards_are_saved(name):
    full = {(OUT, IN), (IN, OUT), (4, OUT, IN), (4, IN, OUT), (3, OUT, IN), (3, IN, OUT)}
    for node in saved(name):
        assert tuple(node.meta["val"].shape) not in full, node.name
        assert not isinstance(node.meta.get(NOTE), GatherNote)


def test_backward_gathers_what_it_needs():
    forward, backward, _ = partitioned("blocks")
    assert len(nodes(forward.graph, c10d.all_gather_into_tensor.default)) == 6
    # The first layer's input needs no gradient, but its norm's weight does.
    assert len(nodes(backward.graph, c10d.all_gather_into_tensor.default)) == 6
    forward, backward, _ = partitioned("dense")  # nothing asks for a gradient of x
    assert len(nodes(backward.graph, c10d.all_gather_into_tensor.default)) == 0


def test_without_it_gathered_weights_are_saved():
    """So the test above means something, and so does check_saved."""
    sizes = [tuple(n.meta["val"].shape) for n in saved("blocks", without=("recompute_gathers",))]
    assert sizes.count((OUT, IN)) + sizes.count((IN, OUT)) >= 6


# Refuses.


def test_what_meets_an_activation_is_never_recomputed():
    """Its recomputation would bring a gather into backward, or not, by the sizes of a rank's batch."""
    graph = behind("dense_bias", *BEFORE, "recompute_gathers")
    (addmm,) = nodes(graph, torch.ops.aten.addmm.default)
    assert addmm.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    inputs = graph.module.graph.find_nodes(op="placeholder")
    assert not any(is_tagged(n) for n in inputs)


def test_what_belongs_to_backward_is_not_tagged():
    graph = behind("blocks", *BEFORE, "recompute_gathers")
    assert not any(is_tagged(n) for n in graph.module.graph.nodes if n.meta.get("partitioner_tag") == "is_backward")


def test_a_users_checkpoint_keeps_its_own_tags():
    graph = behind("checkpointed", *BEFORE)
    own = {n.name: n.meta["ac_graph_id"] for n in graph.module.graph.nodes if "ac_graph_id" in n.meta}
    graph.run("recompute_gathers")
    kept = {n.name for n in graph.module.graph.nodes if n.meta.get("ac_graph_id") == own.get(n.name, -1)}
    changed = set(own) - kept
    assert kept
    # Those that changed are gathers and views of them; their id is above every one of the user's.
    new = {n.meta["ac_graph_id"] for n in graph.module.graph.nodes if n.name in changed}
    assert new
    assert min(new) > max(own.values())


# Preserves.


@pytest.mark.parametrize("name", ["dense", "grouped", "checkpointed"])
def test_operators_and_numbers_stay(name):
    graph = behind(name, *BEFORE)
    before, counts = graph.copy(), ops(graph)
    graph.run("recompute_gathers")
    assert ops(graph) == counts
    assert {d for d in compare_numerics(before, graph) if d is not None} == {0.0}


# Idempotent.


@pytest.mark.parametrize("name", ["dense", "blocks", "checkpointed"])
def test_a_second_run_changes_nothing(name):
    graph = behind(name, *BEFORE, "recompute_gathers")
    before = {n.name: (n.meta.get("recompute"), n.meta.get("ac_graph_id")) for n in graph.module.graph.nodes}
    graph.run("recompute_gathers")
    assert before == {n.name: (n.meta.get("recompute"), n.meta.get("ac_graph_id")) for n in graph.module.graph.nodes}


class PointwiseUse(torch.nn.Module):
    """A sharded weight that is added: cheap to recompute, so that the partitioner would weigh sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(IN, OUT, bias=False)
        self.bias = torch.nn.Parameter(torch.randn(OUT))

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x) + self.bias)


class PickedBlock(torch.nn.Module):
    """Checkpointed experts whose weights are picked for each row: without rows all that they compute is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, *s) * 0.3) for s in ((IN, OUT), (OUT, IN)))

    def experts(self, x, ids):
        y = F.silu(torch.bmm(x.unsqueeze(1), self.up[ids]).squeeze(1))
        return torch.bmm(y.unsqueeze(1), self.down[ids]).squeeze(1)

    def forward(self, x):
        ids = torch.arange(len(x)) % 3
        return checkpoint(self.experts, x, ids, use_reentrant=False) * 2


@pytest.mark.parametrize("block", [PointwiseUse, PickedBlock])
def test_backward_communicates_alike_whatever_the_tokens(block):
    issued = {}
    for rows in (0, 1, 8, 1000):
        torch._dynamo.reset()
        session = Session(dry=True)
        with fake_mesh(2) as mesh:
            model = gtp_compile.shard(block(), mesh, shard_fn=lambda *_: Shard(0))
            run_watched(model, session, {"inner": "eager"}, (torch.randn(rows, IN, requires_grad=True),), {})
        (graph,) = session.graphs
        backward = graph.log.runs[-1].after
        issued[rows] = re.findall(r"(all_gather_into_tensor|reduce_scatter_tensor)\.default\(", backward)
    assert all(starts == issued[1000] for starts in issued.values()), issued
    assert "reduce_scatter_tensor" in issued[1000]
