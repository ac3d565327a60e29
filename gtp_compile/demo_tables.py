"""The demo's results as tables: losses beside the twin's, and gradient errors with and without retyping."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gtp_compile.demo_progress import LOG_EVERY

__all__ = ["error_table", "loss_table", "pass_table"]

# What a person should see at a glance: float32's rounding, bfloat16's, or something between.
_GOOD, _BAD = 1e-5, 1e-3

# Columns.
_NARROW = 100

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def loss_table(loss: list[float], twin_loss: list[float], ascii_only: bool = False) -> Table:
    """The losses of the first, every fifth and the last step."""
    last = len(loss)
    table = _table("Loss, beside that of one process in plain PyTorch")
    for name in ("step", "loss", "twin", "distance"):
        table.add_column(name, justify="right")
    table.add_column("")
    top = max(loss)
    for step in [s for s in range(1, last + 1) if s in (1, last) or s % LOG_EVERY == 0]:
        ours, twin = loss[step - 1], twin_loss[step - 1]
        bar: RenderableType = Bar(top, 0, ours, width=24, color="cyan")
        if ascii_only:
            bar = "#" * round(24 * ours / top)
        table.add_row(str(step), f"{ours:.4f}", f"{twin:.4f}", f"{abs(ours - twin):.4f}", bar)
    return table


def error_table(title: str, rows: list[dict[str, Any]], width: int) -> Table:
    """One row a weight group: where it lies, what it sends, in which dtype that is summed, and the error.

    Args:
        rows: as in the JSON file.
        width: of the console; a narrow one gets fewer columns.
    """
    table = _table(title)
    table.add_column("weight group", overflow="fold")
    table.add_column("placed", no_wrap=True)
    table.add_column("KiB", justify="right", no_wrap=True)
    table.add_column("retyped", justify="right", no_wrap=True)
    table.add_column("not retyped", justify="right", no_wrap=True)
    table.add_column("worse by", justify="right", style="dim", no_wrap=True)
    for row in rows:
        more = f" +{len(row['weights']) - 1}" if len(row["weights"]) > 1 else ""
        error, unretyped = row["error"], row["error_unretyped"]
        worse = f"x {unretyped / error:,.0f}" if error and unretyped and unretyped > error else ""
        table.add_row(
            Text(row["leader"] + more),
            row["layout"].split(" over")[0].removesuffix("()"),
            f"{row['wire_bytes'] / 1024:,.1f}",
            # On one rank nothing is summed; what the GEMM's buffer holds is added to main_grad.
            _sum(row["sum_dtype"] or row["scratch_dtype"], error),
            _sum(row["sum_dtype_unretyped"] or row["scratch_dtype_unretyped"], unretyped),
            worse,
        )
        if not row["matched"]:
            table.add_row(Text(f"  {row['reason']}", style="yellow"))
    if width < _NARROW:
        table.columns = [c for c in table.columns if c.header not in ("KiB", "worse by")]
    return table


def pass_table(passes: list[dict[str, Any]]) -> Table:
    """What each pass did to the training graph."""
    table = _table("Passes")
    for name in ("pass", "graph"):
        table.add_column(name)
    for name in ("matched", "changed", "ms"):
        table.add_column(name, justify="right")
    for p in passes:
        table.add_row(p["pass"], p["phase"], str(p["matched"]), str(p["changed"]), f"{p['milliseconds']:.0f}")
    return table


def _sum(dtype: str | None, error: float | None) -> Text:
    """A sum's dtype and its error, green where that is float32's rounding, red where it is bfloat16's."""
    if error is None:
        return Text("-", style="dim")
    style = "green" if error <= _GOOD else "red" if error >= _BAD else "yellow"
    return Text.assemble((_SHORT.get(dtype or "", dtype or ""), "dim"), f"  {error:.1e}", style=style)
