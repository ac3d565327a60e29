"""The demo's progress: a bar for each part of the work on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from gtp_compile.demo_launch import Warned
from gtp_compile.demo_model import DemoSettings
from gtp_compile.demo_rank import Phase, Started, Step

__all__ = ["LOG_EVERY", "DemoProgress", "header"]

LOG_EVERY = 5

_TITLES = {
    "start": "start the ranks",
    "compile": "compile, first step",
    "train": "train",
    "twin": "train the twin, plain PyTorch",
    "verify": "verify",
    "verify_unretyped": "verify without retype_wgrads",
    "graphs": "write the graphs",
}


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        return Text(_clock(seconds or 0.0), style="dim")


class DemoProgress:
    """Shows what the ranks send, as it comes."""

    def __init__(self, console: Console, settings: DemoSettings) -> None:
        self._console = console
        self._settings = settings
        self._start = time.perf_counter()
        self._phase = Phase("start")
        self._warned: set[str] = set()
        self._task: TaskID | None = None
        self._bars = Progress(
            SpinnerColumn("line", finished_text=Text("*" if console.options.ascii_only else "\u2713", style="green")),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", justify="right"),
            _Elapsed(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Show progress inside the block; nothing of it moves afterwards."""
        self.begin(self._phase)
        if self._console.is_terminal:
            with Live(Group(self._bars), console=self._console, refresh_per_second=10):
                yield
                self.end()
        else:
            yield
            self.end()

    def begin(self, phase: Phase) -> None:
        """Another part of the work begins; the one before is done."""
        if self._task is not None:
            self.end()
        self._phase, self._since = phase, time.perf_counter()
        count = "" if phase.total is None else f"0/{phase.total}"
        self._task = self._bars.add_task(_TITLES[phase.name], total=phase.total, count=count, note="")
        self._line(f"{_TITLES[phase.name]} ...")

    def end(self) -> None:
        """The current part of the work is done."""
        assert self._task is not None
        self.seconds[self._phase.name] = time.perf_counter() - self._since
        total = self._phase.total or 1
        self._bars.update(self._task, total=total, completed=total)
        self._task = None

    def step(self, step: Step) -> None:
        """One step of the current part is done."""
        assert self._task is not None
        note = f"loss {step.loss:.3f}"
        if step.seconds:
            note += f"  {self._settings.tokens_per_step / step.seconds:,.0f} tokens/s"
        count = f"{step.number}/{self._phase.total}"
        self._bars.update(self._task, completed=step.number, count=count, note=note)
        if step.number == 1 or step.number % LOG_EVERY == 0 or step.number == self._phase.total:
            self._line(f"  step {count:>{len(str(self._phase.total)) * 2 + 1}}  {note}")

    def started(self, started: Started) -> None:
        """The ranks run: say what."""
        self._console.print(header(self._settings, started, ascii_only=self._console.options.ascii_only))

    def warned(self, warned: Warned) -> None:
        """Show a warning, once whatever the number of ranks that give it."""
        if warned.text not in self._warned:
            self._warned.add(warned.text)
            self._console.print(Text(f"rank {warned.rank}: {warned.text}", style="yellow"))

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{_clock(time.perf_counter() - self._start)}  {text}", markup=False, highlight=False)


def header(settings: DemoSettings, started: Started, ascii_only: bool = False) -> Panel:
    """What runs, in five lines."""
    import torch
    import transformers

    backend = "NCCL" if settings.device == "cuda" else "gloo"
    threads = (
        f", {settings.threads} thread{'s' if settings.threads > 1 else ''} each" if settings.device == "cpu" else ""
    )
    per_rank = settings.microbatches * settings.batch * settings.sequence
    rows = {
        "model": f"{started.model} of transformers {transformers.__version__}, {started.parameters:,} parameters",
        "weights": "float32 shards; gathered and computed with as bfloat16; gradients summed in float32",
        "ranks": f"{settings.ranks} x {started.device}{threads}, {backend}",
        "compiler": f'torch.compile(backend="gtp") of torch {torch.__version__}, inner {settings.inner}',
        "text": f"pydoc_data.topics, bytes; {settings.steps} steps of {settings.microbatches} microbatches, "
        f"{per_rank:,} bytes a rank",
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(name, Text(text))
    return Panel(grid, title="[bold]gtp-compile demo[/]", title_align="left", expand=False, border_style="cyan")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
