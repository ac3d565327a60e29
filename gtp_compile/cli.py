"""The command line: `gtp-compile demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names, and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    missing = [name for name in ("rich", "transformers") if find_spec(name) is None]
    if missing:
        parser.exit(
            2, f"gtp-compile demo: needs {' and '.join(missing)}; pip install 'gtp-compile[demo]' brings them\n"
        )
    try:
        return _demo(args)
    except KeyboardInterrupt:
        print("gtp-compile demo: interrupted", file=sys.stderr)
        return 130


def _demo(args: argparse.Namespace) -> int:
    # Late, like all that needs torch: --help and a mistyped option answer at once.
    from gtp_compile.demo import DemoError, run_demo

    try:
        return run_demo(args.ranks, args.steps, args.inner, args.json, args.graphs)
    except DemoError as error:
        print(f"gtp-compile demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gtp-compile", description="Generalized tensor parallelism in the compiler.")
    parser.add_argument("--version", action="version", version=f"gtp-compile {version('gtp-compile')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small Qwen3-MoE on several ranks and show the errors of its weight gradients",
        description="Train a small Hugging Face Qwen3-MoE on several ranks of this machine (GPUs where there are "
        "enough, CPU processes otherwise), beside a single-process twin in plain PyTorch; then show how far each "
        "weight gradient is from float64, with and without retyping.",
        epilog="Exit code: 0 if training agrees with its twin and the gradients are right, 1 if not or if a rank "
        "failed, 2 for a wrong argument, 130 if interrupted.",
    )
    demo.add_argument("--ranks", type=_at_least(1), default=2, metavar="N", help="processes to train on (default 2)")
    demo.add_argument(
        "--steps",
        type=_at_least(1),
        default=30,
        metavar="N",
        help="optimizer steps (default 30); with fewer than 30 the losses are shown, but not judged",
    )
    demo.add_argument(
        "--inner",
        choices=("inductor", "eager"),
        default="inductor",
        help="what runs the rewritten graphs: compiled code (default), or one operator after another (starts sooner)",
    )
    demo.add_argument("--json", metavar="FILE", help="write losses, dtypes and errors there")
    demo.add_argument(
        "--graphs",
        metavar="DIR",
        default="build/demo/graphs",
        help="write the graphs before and after every pass there (default build/demo/graphs)",
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is expected, got {text!r}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
