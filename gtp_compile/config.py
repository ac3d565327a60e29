"""The options of the backend: what a user may pass in `torch.compile(..., backend="gtp", options={...})`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from gtp_compile._compat import is_inductor_option, list_mode_options
from gtp_compile.pipeline import PASS_NAMES

__all__ = ["GtpOptions", "parse_options"]


@dataclass(frozen=True, slots=True)
class GtpOptions:
    """Our own options; plain data, all of it part of the compile cache's key.

    Attributes:
        inner: "inductor", or "eager" to run the rewritten graphs as they are (fast to compile, for debugging).
        disable: names of passes to leave out, e.g. ("retype_wgrads",).
        debug_dir: a folder that gets every graph before and after every pass as text, and one diff a pass.
        strict: an unmatched weight gradient is an error, not a report.
        accumulate_into_main_grad: plain weights that carry a `main_grad` (Megatron's convention) get their gradient
            added to it in the compiled backward (see `plain_main_grads`). Changes nothing for distributed weights.
    """

    inner: Literal["inductor", "eager"] = "inductor"
    disable: tuple[str, ...] = ()
    debug_dir: str | None = None
    strict: bool = False
    accumulate_into_main_grad: bool = False


# Without the first two no gradient reaches its main_grad; without the third ranks may wait for each other.
_INDISPENSABLE = frozenset({"insert_collectives", "accumulate_main_grads", "order_collectives"})


def parse_options(mode: str | None, options: dict[str, Any] | None) -> tuple[GtpOptions, dict[str, Any]]:
    """Split what the user passed into our options and Inductor's config patches.

    Args:
        mode: one of `torch.compile`'s modes; torch refuses `mode` and `options` together, so `options={"mode": ...}`
            is another way to give it.
        options: our options, Inductor's, and "mode".

    Raises:
        ValueError: an unknown key, mode, pass name or value; the message lists the known ones.
    """
    given = dict(options or {})
    mode = given.pop("mode", mode)
    patches = _mode_patches(mode)
    ours: dict[str, Any] = {}
    known = {f.name for f in fields(GtpOptions)}
    if "custom_partitioner_fn" in given:
        raise ValueError("backend 'gtp': option custom_partitioner_fn is taken: our passes run in the partitioner")
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in known:
            ours[name] = value
        elif is_inductor_option(name):
            patches[name] = value
        else:
            raise ValueError(
                f"backend 'gtp': unknown option {key!r}; known are {', '.join(sorted(known))}, mode, "
                "and the options of torch._inductor.config"
            )
    if isinstance(ours.get("disable"), str):
        ours["disable"] = (ours["disable"],)
    result = GtpOptions(**{**ours, "disable": tuple(ours.get("disable", ()))})
    if result.inner not in ("inductor", "eager"):
        raise ValueError(f"backend 'gtp': option inner is 'inductor' or 'eager', got {result.inner!r}")
    for name in result.disable:
        if name not in PASS_NAMES:
            raise ValueError(f"backend 'gtp': option disable: no pass {name!r}; known are {', '.join(PASS_NAMES)}")
    if needed := _INDISPENSABLE & set(result.disable):
        raise ValueError(
            f"backend 'gtp': option disable: training is wrong without {', '.join(sorted(needed))}; "
            "run single passes with gtp_compile.testing instead"
        )
    return result, patches


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    modes = list_mode_options()
    if mode not in modes:
        raise ValueError(f"backend 'gtp': unknown mode {mode!r}; known are default, {', '.join(modes)}")
    return dict(modes[mode])
