"""Train every model family of Hugging Face's experts interface, sharded over two ranks, beside a plain twin.

    make sweep SWEEP_ARGS="--families mixtral,gpt_oss --experts batched_mm"

Each family is built from a tiny configuration (`hf_families.tiny`), placed by `gtp_compile.shard` over two gloo ranks,
and trained two steps with `backend="gtp"`. Loss and every gradient are compared with those of a single process in
eager PyTorch that takes both ranks' batches. A family that fails is tried under `backend="eager"`, without sharding:
one that fails there, too, is not ours to mend. A pair of processes serves one family after the other until one hangs or
dies; `--jobs` says how many pairs.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_families
import torch
from hf_families import Outcome
from ranks import Pool

RANKS = 2
INDUCTOR = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
EXPERTS = ("grouped_mm", "batched_mm", "eager")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row to make: a family under one setting of its experts, through one inner compiler."""

    family: str
    experts: str
    inner: str

    @property
    def column(self) -> str:
        return "Inductor" if self.inner == "inductor" else self.experts

    def made(self, row: Row) -> bool:
        return (row["family"], row["experts"], row["inner"]) == (self.family, self.experts, self.inner)


class Pair:
    """Two ranks that serve one call after the other, and are started anew behind a failure."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """What `fn(rank, *args)` returned on rank 0."""
        self._pool = self._pool or Pool(RANKS)
        try:
            return self._pool.call(fn, args, timeout)[0]
        except BaseException:
            self._pool.close()
            self._pool = None
            raise


def sweep_one(case: Case, args: argparse.Namespace, pair: Pair) -> Row:
    """What became of a case, as plain data."""
    begin = time.monotonic()
    row: Row = {**dataclasses.asdict(case), "status": "equal", "reason": ""}
    bf16 = args.bf16 and case.column == "grouped_mm"
    try:
        outcome: Outcome = pair.call(
            hf_families.train, case.family, case.experts, case.inner, args.steps, bf16, timeout=args.timeout
        )
        row |= dataclasses.asdict(outcome)
        if not outcome.equal:
            row["status"] = "differs"
            row["reason"] = f"loss off by {outcome.loss:.1e}; {len(outcome.wrong)} gradients: {outcome.wrong[:3]}"
    except AssertionError as e:
        row["status"] = "hangs" if "no answer in" in str(e) and "Traceback" not in str(e) else "fails"
        row["reason"], row["traceback"] = _last_line(str(e)), str(e)
    if row["status"] != "equal":
        row["backend_eager"] = _backend_eager(case, args, pair)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def _backend_eager(case: Case, args: argparse.Namespace, pair: Pair) -> str:
    try:
        found = pair.call(hf_families.under_backend_eager, case.family, case.experts, timeout=args.timeout)
        return found or "works"
    except AssertionError as e:
        return _last_line(str(e))


def _last_line(trace: str) -> str:
    """The error's own line of the first traceback."""
    first = trace.split("\nrank ")[0].strip().splitlines()
    errors = [line for line in first if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    return (errors or first)[-1][:300]


def sweep(cases: list[Case], args: argparse.Namespace, on_row: Callable[[Row], None]) -> None:
    """Make every row, `args.jobs` at a time; `on_row` gets them as they come, in this thread."""
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    done: queue.SimpleQueue[Row | BaseException] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)

    def serve() -> None:
        pair = Pair()
        while True:
            try:
                done.put(sweep_one(todo.get_nowait(), args, pair))
            except queue.Empty:
                return
            except BaseException as e:
                done.put(e)
                return

    for _ in range(args.jobs):
        threading.Thread(target=serve, daemon=True).start()
    for _ in cases:
        row = done.get()
        if isinstance(row, BaseException):
            raise row
        on_row(row)


def line(row: Row) -> str:
    """The row as one line of text."""
    return "  ".join(
        [
            f"{row['family']:<22}",
            f"{row['experts']:<10}",
            f"{row['inner']:<8}",
            f"{row['status']:<8}",
            f"{row.get('groups', '-')!s:>3} groups",
            f"{len(row.get('unmatched', ())):>2} unmatched",
            f"{len(row.get('uncaptured', ())):>2} uncaptured",
            f"{len(row.get('breaks', ())):>2} breaks",
            f"grad {_number(row.get('grad'))}",
            f"bf16 {_number(row.get('bf16'))}",
            f"{row['seconds']:>6} s",
            row["reason"] + (f" [backend=eager: {row['backend_eager']}]" if "backend_eager" in row else ""),
        ]
    ).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def versions() -> str:
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


_HEAD = """# Hugging Face's model families with experts

Made by `make sweep` (`tests/hf_sweep.py`); eight of the rows are tests (`tests/distributed/test_hf_families.py`).
Each family's model is built from a tiny configuration, placed by `gtp_compile.shard` over two gloo ranks and trained
two steps with `backend="gtp"`, every rank with a batch of its own. Losses and every gradient (main_grad, gathered) are
compared with those of one process in eager PyTorch that takes both batches. A number is the worst relative error of a
gradient (of gradients that are zero but for rounding, relative to 1/1000 of the norm of all), where losses and all
gradients agree to what rounding explains: 16 times the change that one more rounding of every weight makes. Anything
else is said in words; "-": not run.

- `grouped_mm`, `batched_mm`, `eager`: the model's `experts_implementation`, graphs run as they are (`inner="eager"`).
- Inductor: `grouped_mm` through Inductor.
- bf16: `grouped_mm` with `param_dtype=torch.bfloat16`: the worst error of `gtp_compile.verify`.
- GEMM groups (of `grouped_mm`): weight gradients that a pass traced to their GEMM, of all that a GEMM computes.
- Experts: under which kind the stacked expert weights are reported. "gemm": traced to a grouped GEMM.
- Uncaptured: weights with a gradient that are in no compiled graph.

The vision and audio parts of the multimodal families are placed, but get no input.
"""

_COLUMNS = (*EXPERTS, "Inductor")


def markdown(rows: list[Row], date: str, command: str) -> str:
    """A docs page with the table: a line for each family, a column for each way to run it."""
    families = sorted({r["family"] for r in rows})
    by_column = {(r["family"], Case(r["family"], r["experts"], r["inner"]).column): r for r in rows}
    counts = []
    for column in _COLUMNS:
        made = [r for (_, c), r in by_column.items() if c == column]
        if made:
            counts.append(f"`{column}` {sum(r['status'] == 'equal' for r in made)} of {len(made)}")
    head = [*_COLUMNS, "bf16", "GEMM groups", "experts", "uncaptured", "graph breaks"]
    lines = [
        _HEAD,
        f"{date}, {versions()}; `{command}`. Equal: {', '.join(counts)}.",
        "",
        "| family | " + " | ".join(head) + " |",
        "| --- | " + " | ".join(["---"] * len(head)) + " |",
    ]
    for family in families:
        found = [by_column.get((family, column)) for column in _COLUMNS]
        cells = [f"`{family}`", *map(_status, found), *_details(found[0])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _status(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["status"] == "equal":
        return _number(row["grad"])
    text = f'{row["status"]}: {row["reason"]} (`backend="eager"`: {row["backend_eager"]})'
    return text.replace("|", "\\|")


def _details(row: Row | None) -> list[str]:
    if row is None or "groups" not in row:
        return ["-"] * 5
    unmatched = row["bf16_unmatched"] or row["unmatched"]
    return [
        _number(row["bf16"]),
        f"{row['groups'] - len(unmatched)} of {row['groups']}",
        ", ".join(row["stacked"]) or "-",
        str(len(row["uncaptured"])),
        str(len(row["breaks"])),
    ]


def cases(args: argparse.Namespace) -> list[Case]:
    names = args.families or hf_families.families()
    made = [Case(name, experts, args.inner) for experts in args.experts for name in names]
    if args.inductor:
        made += [Case(name, "grouped_mm", "inductor") for name in names if name in INDUCTOR]
    return made


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=names, help="names, separated by commas; default: all")
    parser.add_argument("--experts", type=names, default=["grouped_mm"], help=f"of {', '.join(EXPERTS)}")
    parser.add_argument("--inner", default="eager", choices=["eager", "inductor", "none"], help="none: do not compile")
    parser.add_argument("--inductor", action="store_true", help=f"then {', '.join(INDUCTOR)} through Inductor, too")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="hold bf16 against float64 (gtp_compile.verify), too")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that a family may take")
    parser.add_argument("--jobs", type=int, default=1, help="pairs of processes")
    parser.add_argument("--json", type=Path, help="write the rows here; other rows in it are kept")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date in the table")
    args = parser.parse_args()
    if unknown := sorted(set(args.families or ()) - set(hf_families.families())):
        parser.error(f"no family on the experts interface: {', '.join(unknown)}")
    if unknown := sorted(set(args.experts) - set(EXPERTS)):
        parser.error(f"no experts implementation: {', '.join(unknown)}; there are {', '.join(EXPERTS)}")
    return args


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks end too
    args = _arguments()
    todo = cases(args)
    known: list[Row] = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    rows = [r for r in known if not any(case.made(r) for case in todo)]

    def on_row(row: Row) -> None:
        print(line(row), flush=True)
        rows.append(row)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(sorted(rows, key=lambda r: r["family"]), indent=1) + "\n")

    sweep(todo, args, on_row)
    good = sum(r["status"] == "equal" for r in rows)
    print(f"{good} of {len(rows)} equal; {versions()}")
    if args.markdown:
        args.markdown.write_text(markdown(rows, args.date, f'make sweep SWEEP_ARGS="{" ".join(sys.argv[1:])}"') + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
