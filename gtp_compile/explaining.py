"""`explain`: what the compiler found in a model, group by group, without communicating."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_compile.graph_log import PassRun
from gtp_compile.passes.collective_ops import DryEmit
from gtp_compile.report import Row, hooked_rows, rows_of, split_rows, table
from gtp_compile.session import Session
from gtp_compile.sharding import leaves_of
from gtp_compile.watched import loss_of, preserved_state, run_watched, unwrap

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found; print it, or take `to_dict()`.

    Attributes:
        groups: one row per GEMM weight group.
        others: norms, biases, embeddings, and weights in no compiled graph.
        graphs: for each captured graph, what every pass did, with the graph's text before and after.
    """

    groups: list[Row]
    others: list[Row]
    graphs: list[list[PassRun]]

    def __str__(self) -> str:
        parts = ["GEMM weight groups", table(self.groups), "", "Other weights", table(self.others), ""]
        for i, runs in enumerate(self.graphs):
            parts += [f"Passes on graph {i}", *(run.summary() for run in runs), ""]
        return "\n".join(parts).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "groups": [r.to_dict() for r in self.groups],
            "others": [r.to_dict() for r in self.others],
            "graphs": [
                [
                    {
                        "pass": run.name,
                        "phase": run.phase,
                        "milliseconds": run.milliseconds,
                        "matched": run.report.matched,
                        "changed": run.report.changed,
                        "skipped": [{"node": s.node, "reason": s.reason} for s in run.report.skipped],
                        "ops": run.ops,
                        "before": run.before,
                        "after": run.after,
                    }
                    for run in runs
                ]
                for runs in self.graphs
            ],
        }


def explain(
    model: nn.Module, loss_fn: Callable[[Any], Tensor] | None = None, *, options: dict[str, Any] | None = None
) -> Callable[..., Explanation]:
    """Compile `model` afresh and say what became of each weight group: `print(explain(model)(*args, **kwargs))`.

    Caches are off, and nothing communicates: collectives are replaced by local stand-ins, so one process is enough
    (see `gtp_compile.testing.fake_mesh` for a group of any size on a laptop). No backward runs, and main_grad, `.grad`,
    buffers and random state are left as they were.

    Args:
        model: a sharded model, compiled or not.
        loss_fn: makes the scalar loss of the model's output, for code that is traced behind the model; optional.
        options: the backend's options, as for `torch.compile`.

    Returns:
        A function to call with the model's arguments.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        leaves = leaves_of(unwrap(model))
        names = {id(p): name for name, p in unwrap(model).named_parameters()}
        session = Session(dry=True, names=names)
        emit = DryEmit()
        with preserved_state(model):
            try:
                for leaf in leaves:
                    leaf.emit = emit
                output = run_watched(model, session, options, args, kwargs)
                if loss_fn is not None:
                    with torch.enable_grad():
                        loss_of(output, loss_fn)
            finally:
                for leaf in leaves:
                    leaf.emit = None
        groups, others = split_rows([*rows_of(session, leaves), *hooked_rows(session, unwrap(model))])
        return Explanation(groups, others, [graph.log.runs for graph in session.graphs])

    return run
