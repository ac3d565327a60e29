"""Run a rewritten graph without communicating: for `explain`, on one rank, whatever the size of the group."""

from __future__ import annotations

from typing import Any

from torch import fx

from gtp_compile.hooked_ops import dry_hooks
from gtp_compile.passes.collective_ops import dry_collectives

__all__ = ["DryRun"]


class DryRun(fx.Interpreter):
    """Run a graph with each collective, and each linear with another tool's hooks, replaced by a local stand-in.

    Numbers are meaningless then, shapes and dtypes right; so Python behind a graph break goes on as in a real run.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._stand_ins = dry_collectives() | dry_hooks()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(self._stand_ins.get(target, target), args, kwargs)
