"""What the passes did to one graph, and its text before and after each: for logs, dumps, TORCH_TRACE and `explain`."""

from __future__ import annotations

import collections
import copy
import difflib
import logging
import os
import warnings
from dataclasses import dataclass, field

from torch import fx

from gtp_compile._compat import is_first_rank, trace_artifact
from gtp_compile.passes.base import PassReport

__all__ = ["GraphLog", "PassRun", "copy_module", "count_ops", "graph_text"]

log = logging.getLogger(__name__)


def graph_text(gm: fx.GraphModule) -> str:
    """The graph as readable Python, each value with its dtype and shape."""
    text = gm.print_readable(print_output=False, include_stride=False, include_device=False)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph, metadata included; its constants are shared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own pytree, when it is copied
        # Not of the module: under the compiler's fake mode, a constant tensor can't be copied.
        return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def count_ops(graph: fx.Graph) -> collections.Counter[str]:
    """How often each operator is called, by its printed name ("aten.mm.default")."""
    return collections.Counter(str(n.target) for n in graph.nodes if n.op == "call_function")


@dataclass(frozen=True, slots=True)
class PassRun:
    """One pass on one graph.

    Attributes:
        name: the pass.
        phase: "joint", "backward" or "inference".
        milliseconds: its time, checks left out.
        report: what it matched, changed, skipped.
        ops: operators that it added (positive) or removed, by name.
        before, after: the graph's text, where somebody wants it ("" otherwise).
    """

    name: str
    phase: str
    milliseconds: float
    report: PassReport
    ops: dict[str, int]
    before: str = ""
    after: str = ""

    def summary(self) -> str:
        """One line for people."""
        ops = ", ".join(f"{name} {change:+d}" for name, change in sorted(self.ops.items())) or "no operators changed"
        skipped = f", skipped {len(self.report.skipped)}" if self.report.skipped else ""
        return (
            f"{self.phase:>9} {self.name:<22} {self.milliseconds:6.1f} ms  matched {self.report.matched}, "
            f"changed {self.report.changed}{skipped}; {ops}"
        )


@dataclass(slots=True)
class GraphLog:
    """The runs of all passes on one captured graph, in order; writes them where they are wanted.

    Attributes:
        name: e.g. "graph_0_0", as torch numbers compilations; the folder below `debug_dir`.
        debug_dir: where the first rank's texts go, or None.
        keep_text: keep the texts in `runs`, for `explain`.
    """

    name: str
    debug_dir: str | None = None
    keep_text: bool = False
    runs: list[PassRun] = field(default_factory=list)

    @property
    def wants_text(self) -> bool:
        return self.keep_text or self.debug_dir is not None or log.isEnabledFor(logging.DEBUG)

    def add(self, run: PassRun) -> None:
        self.runs.append(run)
        log.info("%s: %s", self.name, run.summary())
        for skip in run.report.skipped:
            log.info("%s: %s skipped %s: %s", self.name, run.name, skip.node, skip.reason)

    def captured(self, phase: str, text: str) -> None:
        """Keep a graph as it came, before the first pass of a phase."""
        self._emit(f"{phase}.captured", text, f"# {self.name}, {phase} graph, as captured\n")

    def changed(self, run: PassRun) -> None:
        """Keep a graph behind a pass, and the difference it made."""
        head = f"# {self.name}, {run.phase} graph, after {run.name} (step {len(self.runs)})\n"
        self._emit(f"{run.name}.after", run.after, head)
        diff = difflib.unified_diff(
            run.before.splitlines(keepends=True), run.after.splitlines(keepends=True), "before", "after", n=2
        )
        self._emit(f"{run.name}.diff", "".join(diff) or "unchanged\n", head)

    def _emit(self, label: str, text: str, head: str) -> None:
        suffix = "diff" if label.endswith(".diff") else "py"
        name = f"{len(self.runs):02d}_{label}.{suffix}".replace(".diff.diff", ".diff")
        trace_artifact(f"gtp_{self.name}_{name}", head + text)
        if self.debug_dir is not None and is_first_rank():
            folder = os.path.join(self.debug_dir, self.name)
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, name)
            with open(path, "w") as f:
                f.write(head + text)
