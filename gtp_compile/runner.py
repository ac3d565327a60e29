"""Run passes over a graph: time, check, log. A pass file holds none of that."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from torch import fx

from gtp_compile.checks import check_graph, check_metadata, wrong_metadata
from gtp_compile.graph_log import GraphLog, PassRun, count_ops, graph_text
from gtp_compile.passes.base import Pass, PassContext, outputs_of

__all__ = ["run_passes"]


def run_passes(gm: fx.GraphModule, passes: Iterable[Pass], ctx: PassContext, log: GraphLog) -> None:
    """Run `passes` in order on `gm`, in place.

    Where somebody looks at the graphs (a debug folder, `explain`), metadata is re-derived after each pass, too.

    Raises:
        RuntimeError: an invariant is broken after a pass; the message names the pass and the node.
    """
    outputs = len(outputs_of(gm.graph))
    wrong: Collection[fx.Node] = wrong_metadata(gm) if log.wants_text else ()
    for run in passes:
        name = run.__name__
        given = set(gm.graph.nodes)
        before, ops = graph_text(gm) if log.wants_text else "", count_ops(gm.graph)
        start = time.perf_counter()
        report = run(gm, ctx)
        milliseconds = (time.perf_counter() - start) * 1e3
        gm.graph.eliminate_dead_code()
        try:
            check_graph(gm, given)
            if log.wants_text:
                wrong = check_metadata(gm, wrong)
        except RuntimeError as error:
            raise RuntimeError(f"after pass {name}: {error}") from error
        if len(outputs_of(gm.graph)) != outputs:
            raise RuntimeError(f"after pass {name}: the number of the graph's outputs changed from {outputs}")
        delta = count_ops(gm.graph)
        delta.subtract(ops)
        changes = {op: n for op, n in delta.items() if n}
        after = graph_text(gm) if log.wants_text else ""
        result = PassRun(name, ctx.phase, milliseconds, report, changes, before, after)
        log.add(result)
        if log.wants_text:
            log.changed(result)
    gm.recompile()
