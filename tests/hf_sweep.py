"""Train every model family of Hugging Face's experts interface, sharded over two ranks, beside a plain twin.

    make sweep SWEEP_ARGS="--families mixtral,gpt_oss --experts batched_mm"

Each family is built from a tiny configuration (`hf_families.tiny`), placed by `gtp_compile.shard` over two gloo ranks,
and trained two steps with `backend="gtp"`. Loss and every gradient are compared with those of a single process in
eager PyTorch that takes both ranks' batches. A family that fails is tried under `backend="eager"`, without sharding:
one that fails there, too, is not ours to mend. One pair of processes serves all families until one hangs or dies.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hf_families
import torch
from hf_families import Outcome
from ranks import run_ranks

RANKS = 2
INDUCTOR = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def sweep_one(family: str, args: argparse.Namespace, inner: str) -> dict[str, Any]:
    """One row: what became of a family, as plain data."""
    begin = time.monotonic()
    row: dict[str, Any] = {"family": family, "experts": args.experts, "inner": inner, "status": "equal", "reason": ""}
    try:
        outcome: Outcome = run_ranks(
            hf_families.train, RANKS, family, args.experts, inner, args.steps, args.bf16, timeout=args.timeout
        )[0]
        row |= dataclasses.asdict(outcome)
        if not outcome.equal:
            row["status"] = "differs"
            row["reason"] = f"loss off by {outcome.loss:.1e}; {len(outcome.wrong)} gradients: {outcome.wrong[:3]}"
    except AssertionError as e:
        row["status"] = "hangs" if "no answer in" in str(e) and "Traceback" not in str(e) else "fails"
        row["reason"], row["traceback"] = _last_line(str(e)), str(e)
    if row["status"] != "equal":
        row["backend_eager"] = _backend_eager(family, args)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def _backend_eager(family: str, args: argparse.Namespace) -> str:
    try:
        return (
            run_ranks(hf_families.under_backend_eager, RANKS, family, args.experts, timeout=args.timeout)[0] or "works"
        )
    except AssertionError as e:
        return _last_line(str(e))


def _last_line(trace: str) -> str:
    """The error's own line of the first traceback."""
    first = trace.split("\nrank ")[0].strip().splitlines()
    errors = [line for line in first if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    return (errors or first)[-1][:300]


def line(row: dict[str, Any]) -> str:
    """The row as one line of text."""
    return "  ".join(
        [
            f"{row['family']:<22}",
            f"{row['status']:<8}",
            f"{row.get('groups', '-')!s:>3} groups",
            f"{len(row.get('unmatched', ())):>2} unmatched",
            f"{len(row.get('uncaptured', ())):>2} uncaptured",
            f"{len(row.get('breaks', ())):>2} breaks",
            f"grad {row.get('grad', float('nan')):.0e}",
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
two steps with `backend="gtp"`, every rank with a batch of its own. *Equal*: both losses and every gradient (main_grad,
gathered) agree with those of one process in eager PyTorch that takes both batches, to what rounding explains: 16 times
the change that one more rounding of every weight makes.

- GEMM groups: weight gradients that a pass traced to their GEMM, of all that a GEMM computes.
- Experts: under which kind the stacked expert weights are reported. "gemm": traced to a grouped GEMM.
- Uncaptured: weights with a gradient that are in no compiled graph.
- Gradients: the worst relative error (of gradients that are zero but for rounding, relative to 1/1000 of the norm of
  all).
- bf16: the same model with `param_dtype=torch.bfloat16`: the worst error of `gtp_compile.verify`; "-": not run.

The vision and audio parts of the multimodal families are placed, but get no input.
"""


def markdown(rows: list[dict[str, Any]], date: str, command: str) -> str:
    """A docs page with the table."""
    good = sum(r["status"] == "equal" for r in rows)
    missing = [
        {"family": n, "status": "not run"} for n in hf_families.families() if n not in {r["family"] for r in rows}
    ]
    lines = [
        _HEAD,
        f"{date}, {versions()}; `{command}`: **{good} of {len(rows) + len(missing)} equal**"
        + (f", {len(missing)} not run." if missing else "."),
        "",
        "| family | status | GEMM groups | experts | uncaptured | graph breaks | loss | gradients | bf16 | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted([*rows, *missing], key=lambda r: r["family"]):
        status = r["status"] if r["status"] in ("equal", "not run") else f"{r['status']}: {r['reason']}"
        if "backend_eager" in r:
            status += f' (`backend="eager"`: {r["backend_eager"]})'
        if "groups" in r:
            unmatched = r["bf16_unmatched"] or r["unmatched"]
            cells = [
                f"{r['groups'] - len(unmatched)} of {r['groups']}", ", ".join(r.get("stacked", ())) or "-",
                len(r["uncaptured"]), len(r["breaks"]), f"{r['loss']:.0e}", f"{r['grad']:.0e}", _number(r["bf16"]),
                f"{r['seconds']:.0f}",
            ]  # fmt: skip
        else:
            cells = ["-"] * 8
        lines.append("| " + " | ".join([f"`{r['family']}`", status.replace("|", "\\|"), *map(str, cells)]) + " |")
    return "\n".join(lines)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks end too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="names, separated by commas; default: all")
    parser.add_argument("--experts", default="grouped_mm", choices=["grouped_mm", "batched_mm", "eager"])
    parser.add_argument("--inner", default="eager", choices=["eager", "inductor", "none"], help="none: do not compile")
    parser.add_argument("--inductor", action="store_true", help=f"through Inductor, and only {', '.join(INDUCTOR)}")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="then hold bf16 against float64 (gtp_compile.verify), too")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that a family may take")
    parser.add_argument("--json", type=Path, help="write the rows here; rows of other families in it are kept")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date in the table")
    args = parser.parse_args()
    names = hf_families.families()
    if args.inductor:
        args.inner = "inductor"
        names = [n for n in names if n in INDUCTOR]
    if args.families:
        unknown = sorted(set(args.families.split(",")) - set(hf_families.families()))
        if unknown:
            parser.error(f"no family on the experts interface: {', '.join(unknown)}")
        names = args.families.split(",")
    rows = []
    for name in names:
        rows.append(sweep_one(name, args, args.inner))
        print(line(rows[-1]), flush=True)
        if args.json:
            known = json.loads(args.json.read_text()) if args.json.exists() else []
            kept = [r for r in known if r["family"] != name]
            args.json.write_text(json.dumps(sorted([*kept, rows[-1]], key=lambda r: r["family"]), indent=1) + "\n")
    if args.json:
        rows = json.loads(args.json.read_text())
    good = sum(r["status"] == "equal" for r in rows)
    print(f"{good} of {len(rows)} equal; {versions()}")
    if args.markdown:
        flags = f" --experts {args.experts}" + f" --inner {args.inner}" + (" --bf16" if args.bf16 else "")
        args.markdown.write_text(markdown(rows, args.date, 'make sweep SWEEP_ARGS="' + flags.strip() + '"') + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
