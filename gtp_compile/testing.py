"""Unit-test one pass: capture a joint graph, run the pass, count operators, compare numbers. One process, no GPU.

from gtp_compile import testing

with testing.fake_mesh(4) as mesh:                       # a group of four ranks, in this process
    model = gtp_compile.shard(MyExperts(), mesh, param_dtype=torch.bfloat16)
    joint = testing.capture_joint(model, x)              # with anchors, as the first pass gets it
    before = joint.copy()
    joint.run("group_wgrads")
    run = joint.run("retype_wgrads")
    assert run.ops["gtp.dense_wgrad.default"] == 2
    assert testing.compare_numerics(before, joint)[0] == 0.0   # first output: the forward is unchanged
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from gtp_compile._compat import fake_store
from gtp_compile.dry_run import DryRun
from gtp_compile.graph_log import GraphLog, PassRun, copy_module, count_ops, graph_text
from gtp_compile.passes.base import PassContext
from gtp_compile.passes.collective_ops import DryEmit
from gtp_compile.pipeline import BACKWARD_PASSES, JOINT_PASSES
from gtp_compile.runner import run_passes
from gtp_compile.session import Session
from gtp_compile.sharding import leaves_of
from gtp_compile.watched import preserved_state, run_watched, unwrap

__all__ = ["JointGraph", "capture_joint", "compare_numerics", "count_ops", "fake_mesh"]

_PASSES = {p.__name__: p for p in (*JOINT_PASSES, *BACKWARD_PASSES)}


@contextlib.contextmanager
def fake_mesh(world_size: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """A one-dimensional mesh of `world_size` ranks in this process, of which it is rank 0.

    Its collectives do nothing: graphs, shapes and dtypes are right, numbers are not. For `explain` and pass tests.

    Raises:
        RuntimeError: a process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("fake_mesh: a process group is initialised already; use a mesh over it")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh(device_type, (world_size,), mesh_dim_names=("gtp",))
    finally:
        dist.destroy_process_group()


@dataclass(slots=True)
class JointGraph:
    """A joint graph as the passes get it, and inputs to run it with.

    Attributes:
        module: forward and backward in one graph, with anchors.
        num_fwd_outputs: how many of its outputs are the forward's; gradients follow.
        primals: the inputs of the forward, as the model was called.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    primals: tuple[Any, ...]

    def copy(self) -> JointGraph:
        """An independent graph with the same inputs."""
        return JointGraph(copy_module(self.module), self.num_fwd_outputs, self.primals)

    def run(self, pass_name: str) -> PassRun:
        """Run one pass on the graph, in place, with every check on.

        Raises:
            KeyError: no pass of that name.
            RuntimeError: the pass broke an invariant.
        """
        step = _PASSES[pass_name]
        phase = "backward" if step in BACKWARD_PASSES else "joint"
        log = GraphLog("test", keep_text=True)
        run_passes(self.module, (step,), PassContext(phase, self.num_fwd_outputs), log)  # type: ignore[arg-type]
        return log.runs[0]

    def text(self) -> str:
        """The graph as readable Python."""
        return graph_text(self.module)

    def evaluate(self, seed: int = 0) -> list[Tensor | None]:
        """All outputs, for the captured primals and random tangents; collectives are local stand-ins."""
        generator = torch.Generator().manual_seed(seed)
        placeholders = self.module.graph.find_nodes(op="placeholder")
        inputs = [p.detach() if isinstance(p, Tensor) else p for p in self.primals]
        for node in placeholders[len(inputs) :]:
            value = node.meta["val"]
            tangent = torch.randn(tuple(value.shape), generator=generator).to(value.device, value.dtype)
            # The graph was traced for gradients with these strides; its views may need them.
            inputs.append(tangent.new_empty_strided(tuple(value.shape), value.stride()).copy_(tangent))
        for x in inputs:
            if isinstance(x, Tensor):
                x.emit = DryEmit()  # type: ignore[attr-defined]  # an anchor that is still in the graph stays local, too
        with torch.no_grad():
            results = DryRun(self.module).run(*inputs)
        return list(tree_leaves(results, is_leaf=lambda x: x is None))


def capture_joint(model: nn.Module, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> JointGraph:
    """The joint graph of `model`, called with these arguments, before the first pass.

    Raises:
        ValueError: the model gives no joint graph with a placed weight, or several (a graph break).
    """
    session = Session(dry=True, keep_joint=True)
    leaves = leaves_of(unwrap(model))
    with preserved_state(model):
        for leaf in leaves:
            leaf.emit = DryEmit()
        try:
            run_watched(model, session, options, args, kwargs)
        finally:
            for leaf in leaves:
                leaf.emit = None
    found = [g for g in session.graphs if g.joint is not None]
    if len(found) != 1 or found[0].joint is None:
        raise ValueError(
            f"capture_joint: one joint graph with placed weights is expected, the model gave {len(found)}; shard the "
            "model, call it where gradients are needed, and capture parts of it if it has graph breaks"
        )
    return JointGraph(found[0].joint, found[0].num_fwd_outputs, found[0].inputs)


def compare_numerics(one: JointGraph, other: JointGraph, seed: int = 0) -> list[float | None]:
    """For each output, the relative Frobenius difference of two graphs on the same inputs (absolute where `one` is 0).

    None where neither graph has that output. Outputs are compared in float64.

    Raises:
        ValueError: the graphs have different outputs.
    """
    a, b = one.evaluate(seed), other.evaluate(seed)
    if [x is None for x in a] != [x is None for x in b]:
        raise ValueError(f"compare_numerics: outputs differ in kind: {len(a)} and {len(b)}, some None in one only")
    return [None if x is None or y is None else _difference(x, y) for x, y in zip(a, b, strict=True)]


def _difference(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    norm = x.norm().item()
    return (x - y).norm().item() / (norm or 1.0)
