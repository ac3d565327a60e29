"""The joint graph's way through the passes, and its partition into forward and backward.

A `CustomPartitionerFn`, because that is the one hook which gets the whole joint graph and is part of the keys of both
compile caches (a `joint_custom_pass` is in neither: a warm cache skips it, and training goes on with rounded sums).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from gtp_compile._compat import CustomPartitionerFn, min_cut_rematerialization_partition
from gtp_compile.checks import check_saved
from gtp_compile.config import GtpOptions
from gtp_compile.graph_log import GraphLog, copy_module, graph_text
from gtp_compile.passes.base import Pass, PassContext
from gtp_compile.passes.describe import GroupInfo, check_dtypes, describe_groups, describe_wire
from gtp_compile.passes.hooked import hooked_groups
from gtp_compile.passes.order_collectives import JointOrder
from gtp_compile.pipeline import BACKWARD_PASSES, INFERENCE_PASSES, JOINT_PASSES, VERIFY_PASSES
from gtp_compile.runner import run_passes
from gtp_compile.session import CapturedGraph, current_session

__all__ = ["GtpPartitioner", "lower_inference", "source_hash"]

log = logging.getLogger(__name__)

_HERE = pathlib.Path(__file__).parent


@functools.cache
def source_hash() -> str:
    """A digest of the package's source: an edited pass must not find graphs that its old self made."""
    import gtp_compile.kernels
    import gtp_compile.passes

    digest = hashlib.sha256()
    folders = [*gtp_compile.kernels.__path__, *gtp_compile.passes.__path__]
    # passes/ and kernels/ lie inside this folder in a wheel, and beside it in the repository.
    paths = [p for folder in folders for p in pathlib.Path(folder).rglob("*.py")] + [*_HERE.glob("*.py")]
    for path in sorted(paths, key=lambda p: p.parts[-2:]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class GtpPartitioner(CustomPartitionerFn):
    """Run the joint passes, partition, run the backward passes.

    Pickled into the cache key with all its attributes: plain data only.

    Args:
        options: the user's.
        graph_name: of this graph in logs and dumps; not part of the key.
        input_names: of this graph's inputs, for errors; nor are they.
    """

    def __init__(self, options: GtpOptions, graph_name: str, input_names: Sequence[str] = ()) -> None:
        self.options = options
        self.graph_name = graph_name
        self.input_names = tuple(input_names)

    def uuid(self) -> str:
        return f"{source_hash()} {self.options}"

    def __deepcopy__(self, memo: dict[int, Any]) -> GtpPartitioner:
        return self  # immutable; torch copies its configuration now and then

    def __getstate__(self) -> dict[str, Any]:
        # Equal graphs must have equal keys, whichever came first in its process: no name. All sources, though.
        return {"options": self.options, "source": source_hash()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self.graph_name, self.input_names = state["options"], "graph", ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        session = current_session()
        num_fwd_outputs = kwargs["num_fwd_outputs"]
        keep_text = session is not None and session.keep_text
        graph_log = GraphLog(self.graph_name, self.options.debug_dir, keep_text=keep_text)
        captured = CapturedGraph(graph_log, num_fwd_outputs=num_fwd_outputs)
        if session is not None:
            session.graphs.append(captured)
            captured.joint = copy_module(gm) if session.keep_joint else None
        record = session is not None and session.record
        ctx = PassContext(
            "joint", num_fwd_outputs, programs=session.programs if session is not None and record else None
        )
        captured.hooked = hooked_groups(gm.graph)
        graph_log.captured("joint", graph_text(gm) if graph_log.wants_text else "")
        captured.groups = self._joint(gm, ctx, graph_log, record)
        order = JointOrder(gm.graph, num_fwd_outputs)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if "recompute_gathers" not in self.options.disable:
            check_saved(forward, num_fwd_outputs)
        backward_ctx = PassContext("backward", joint_order=order)
        graph_log.captured("backward", graph_text(backward) if graph_log.wants_text else "")
        run_passes(backward, self._enabled(BACKWARD_PASSES), backward_ctx, graph_log)
        return forward, backward

    def _joint(self, gm: fx.GraphModule, ctx: PassContext, graph_log: GraphLog, record: bool) -> list[GroupInfo]:
        groups: list[GroupInfo] = []
        extra = dict(VERIFY_PASSES) if record else {}
        for step in self._enabled(JOINT_PASSES):
            if step.__name__ == "insert_collectives":
                groups = describe_groups(gm.graph)
            if step.__name__ in extra:
                run_passes(gm, (extra[step.__name__],), ctx, graph_log)
            run_passes(gm, (step,), ctx, graph_log)
        groups = describe_wire(gm.graph, groups)
        check_dtypes(gm.graph, groups, retyped="retype_wgrads" not in self.options.disable)
        unmatched = [g for g in groups if not g.matched and g.rule_dtype.itemsize > 2]
        if unmatched and self.options.strict:
            raise RuntimeError(
                "strict: weight gradients that would be summed after a rounding: "
                + "; ".join(f"{self._names(g)}: {g.reason}" for g in unmatched)
            )
        return groups

    def _names(self, group: GroupInfo) -> str:
        if not self.input_names:
            return f"inputs {group.inputs}"
        return ", ".join(self.input_names[i] for i in group.inputs)

    def _enabled(self, passes: tuple[Pass, ...]) -> list[Pass]:
        return [p for p in passes if p.__name__ not in self.options.disable]


def lower_inference(gm: fx.GraphModule, options: GtpOptions, graph_name: str) -> None:
    """Lower the anchors of a graph that is never partitioned (`torch.no_grad`), in place."""
    session = current_session()
    keep_text = session is not None and session.keep_text
    graph_log = GraphLog(graph_name, options.debug_dir, keep_text=keep_text)
    if session is not None:
        session.graphs.append(CapturedGraph(graph_log))
    graph_log.captured("inference", graph_text(gm) if graph_log.wants_text else "")
    run_passes(gm, INFERENCE_PASSES, PassContext("inference"), graph_log)
