"""`gtp-compile demo`: start the ranks, show what they do, judge and write down what came out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from gtp_compile.demo_launch import RankFailed, Warned, launch
from gtp_compile.demo_model import SHARDED_SIZE, DemoSettings
from gtp_compile.demo_progress import DemoProgress
from gtp_compile.demo_rank import Finished, Phase, Started, Step, run_rank
from gtp_compile.demo_tables import error_table, loss_table, pass_table

__all__ = ["DemoError", "check", "merge_rows", "run_demo"]

# What a run of 30 steps or more must reach.
JUDGED_STEPS = 30
LOSS_RATIO = 0.9
TWIN_DISTANCE = 0.05
# Of a GEMM group; tensor cores add up in an order, and with a precision, of their own.
GEMM_ERROR = {"cpu": 1e-6, "cuda": 2e-5}

# Without a terminal there's nothing to fit into.
_PLAIN_WIDTH = 120

# Both of `verify`'s runs agree on these.
_ROW_KEYS = (
    "weights", "leader", "layout", "matched", "reason", "gemm_dtype", "scratch_dtype", "wire_dtype", "sum_dtype",
    "main_grad_dtype", "wire_bytes", "wire_formula", "error",
)  # fmt: skip


class DemoError(ValueError):
    """The demo can't start as asked; the message says how it can."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; `passed` is None where it wasn't judged."""

    text: str
    passed: bool | None


def run_demo(ranks: int, steps: int, inner: str, json_file: str | None, graphs: str) -> int:
    """Run the demo and return the command's exit code: 0 if all that is judged holds, else 1.

    Raises:
        DemoError: an argument that can't work.
    """
    start = time.perf_counter()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    settings = _settings(ranks, steps, inner, graphs, console)
    _prepare_outputs(json_file, Path(graphs))
    progress = DemoProgress(console, settings)
    try:
        started, finished = _watch(settings, progress)
    except RankFailed as error:
        console.print(Text(str(error), style="red"))
        return 1
    report = _report(settings, started, finished)
    checks = check(report, settings.device)
    report["checks"] = [{"text": c.text, "passed": c.passed} for c in checks]
    report["seconds"] = {**progress.seconds, "total": time.perf_counter() - start}
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    _show(console, report, checks, json_file)
    return 1 if any(c.passed is False for c in checks) else 0


def _settings(ranks: int, steps: int, inner: str, graphs: str, console: Console) -> DemoSettings:
    if SHARDED_SIZE % ranks:
        fits = ", ".join(str(n) for n in range(1, SHARDED_SIZE + 1) if SHARDED_SIZE % n == 0)
        raise DemoError(f"--ranks: {ranks} ranks can't share the model's weights evenly; choose one of {fits}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < ranks:
        console.print(f"{gpus} GPU(s) for {ranks} ranks: running on the CPU instead")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return DemoSettings(ranks, steps, inner, os.path.abspath(graphs), "cuda" if gpus >= ranks else "cpu", threads)


def _prepare_outputs(json_file: str | None, graphs: Path) -> None:
    """Find out now, not after the training, whether the results can be written."""
    try:
        graphs.mkdir(parents=True, exist_ok=True)
        if json_file is not None:
            file = Path(json_file)
            file.parent.mkdir(parents=True, exist_ok=True)
            new = not file.exists()
            with open(file, "a"):
                pass
            if new:
                file.unlink()
    except OSError as error:
        raise DemoError(f"can't write {error.filename}: {error.strerror}; choose another --json or --graphs") from None
    # An earlier run's graphs, by the names that the backend gives: mixed with new ones they would mislead.
    for folder in graphs.glob("graph_*/"):
        for old in folder.iterdir():
            if re.fullmatch(r"\d\d_\w+(\.\w+)?\.(py|diff)", old.name):
                old.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()


def _watch(settings: DemoSettings, progress: DemoProgress) -> tuple[Started, Finished]:
    started = finished = None
    with progress.running(), contextlib.closing(launch(run_rank, settings.ranks, settings)) as messages:
        for message in messages:
            match message:
                case Started():
                    started = message
                    progress.started(message)
                case Phase():
                    progress.begin(message)
                case Step():
                    progress.step(message)
                case Warned():
                    progress.warned(message)
                case Finished():
                    finished = message
    assert started is not None and finished is not None, "the ranks ended well without a result"
    return started, finished


def _report(settings: DemoSettings, started: Started, finished: Finished) -> dict[str, Any]:
    """The JSON file's contents, but for times and checks."""
    return {
        "model": started.model,
        "parameters": started.parameters,
        "ranks": settings.ranks,
        "device": started.device,
        "steps": settings.steps,
        "microbatches": settings.microbatches,
        "tokens_per_step": settings.tokens_per_step,
        "inner": settings.inner,
        "loss": finished.loss,
        "twin_loss": finished.twin_loss,
        "groups": merge_rows(finished.retyped["groups"], finished.unretyped),
        "others": merge_rows(finished.retyped["others"], finished.unretyped),
        "passes": finished.passes,
        "graphs": settings.graphs,
        "versions": {
            **{name: version(name) for name in ("gtp-compile", "torch", "transformers")},
            "python": platform.python_version(),
        },
    }


def merge_rows(rows: list[dict[str, Any]], unretyped: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `verify`, each with what the run without retype_wgrads says of the same weights.

    Args:
        rows: "groups" or "others" of the run with all passes.
        unretyped: the other run's `Verification.to_dict()`.
    """
    other = {tuple(r["weights"]): r for r in (*unretyped["groups"], *unretyped["others"])}
    merged = []
    for row in rows:
        twin = other.get(tuple(row["weights"]), {})
        merged.append(
            {key: row[key] for key in _ROW_KEYS}
            | {f"{key}_unretyped": twin.get(key) for key in ("error", "scratch_dtype", "sum_dtype")}
        )
    return merged


def check(report: dict[str, Any], device: str) -> list[Check]:
    """What must hold, and whether it does."""
    loss, twin = report["loss"], report["twin_loss"]
    ratio = loss[-1] / loss[0]
    distance = _largest([abs(a - b) for a, b in zip(loss, twin, strict=True)])
    judged = len(loss) >= JUDGED_STEPS
    bound = GEMM_ERROR[device]
    errors = [row["error"] for row in report["groups"]]
    worst = _largest([math.nan if e is None else e for e in errors])
    return [
        Check(
            f"last loss is {ratio:.2f} of the first, at most {LOSS_RATIO} allowed",
            ratio <= LOSS_RATIO if judged else None,
        ),
        Check(
            f"largest distance to the twin's loss is {distance:.4f}, at most {TWIN_DISTANCE} allowed",
            distance <= TWIN_DISTANCE if judged else None,
        ),
        Check(
            f"largest error of {len(errors)} GEMM weight groups is {worst:.1e}, at most {bound:.0e} allowed",
            worst <= bound,
        ),
    ]


def _largest(values: list[float]) -> float:
    """The largest value; not a number (so that no comparison holds) if one isn't, or if there's none."""
    return math.nan if not values or any(math.isnan(v) for v in values) else max(values)


def _show(console: Console, report: dict[str, Any], checks: list[Check], json_file: str | None) -> None:
    tables = [
        loss_table(report["loss"], report["twin_loss"], console.options.ascii_only),
        pass_table(report["passes"]),
        error_table("Weight gradients of GEMMs: dtype of the sum, error", report["groups"], console.width),
        error_table("Norms, biases, embeddings: dtype of the sum, error", report["others"], console.width),
    ]
    for table in tables:
        console.print()
        console.print(table)
    console.print("error: of one step's change of main_grad, relative to float64 from the same operands", style="dim")
    console.print()
    for c in checks:
        words = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("not judged", "yellow")}
        note = f" (it takes {JUDGED_STEPS} steps)" if c.passed is None else ""
        word, style = words[c.passed]
        console.print(Text.assemble((f"{word:<10}", style), f"  {c.text}{note}"))
    files = sum(1 for _ in Path(report["graphs"]).rglob("*.*"))
    lines = {
        "graphs": f"{report['graphs']} ({files} files: before and after each pass)",
        "JSON": json_file,
        "time": f"{report['seconds']['total']:.0f} s",
    }
    for name, text in lines.items():
        if text is not None:
            console.print(Text.assemble((f"{name:<10}", "cyan"), f"  {text}"), soft_wrap=True)
