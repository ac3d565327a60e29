"""`accumulate_into_main_grad`: plain weights whose gradient a compiled backward adds to their `main_grad`, in place.

Megatron's convention for weights that nobody distributes: the trainer keeps `param.main_grad`, wants the gradient added
there, and reads of `param.grad_added_to_main_grad` that `.grad` is only a dummy. Opt-in, because a trainer that does
not know the convention would find no gradient.

Before:  weight -> mm ...                    ... -> bf16[N, K] -> output
After:   weight, main_grad -> materialize -> mm ...      ... -> f32[N, K] -> finalize -> getitem -> output

That is the anchor of a distributed weight over no ranks at all, so every pass treats it as it does those: its GEMM
writes main_grad's dtype, all uses are summed first, and the backward graph adds to main_grad in place.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gtp_compile._compat import current_backward
from gtp_compile.bare_reads import input_name, real_input
from gtp_compile.parameters import ComputeLeaf, check_main_grad_dtype
from gtp_compile.passes.collective_ops import REPLICATED
from gtp_compile.weights import is_distributed_weight

__all__ = ["Tap", "finish", "main_grads_of", "prepare", "tap_main_grads"]


@dataclass(frozen=True, slots=True)
class Tap:
    """One input of a graph that is a plain weight with a main_grad.

    Attributes:
        index: its position among the graph's inputs.
        name: as the code calls it that was compiled first; equal layers share a graph.
        dtype: of the main_grad that the graph was compiled for.
    """

    index: int
    name: str
    dtype: torch.dtype


def tap_main_grads(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], list[Tap]]:
    """A copy of a Dynamo graph, with main_grad inputs behind its own; itself where no plain weight has one.

    Raises:
        ValueError, TypeError: a main_grad that can't be added to.
    """
    found = [
        (i, node, weight, weight.main_grad)
        for i, (node, example) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
        if _is_plain_weight(weight := real_input(node, example)) and node.users
    ]
    if not found or not torch.is_grad_enabled():
        return gm, list(example_inputs), []
    # Not in place: Dynamo walks its graph again behind us.
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copied))
    new = fx.GraphModule(gm, graph)
    new.meta = copy.copy(gm.meta)
    for old, node in copied.items():
        if old.op == "placeholder":
            node._dynamo_source = getattr(old, "_dynamo_source", None)  # type: ignore[attr-defined]
    last = graph.find_nodes(op="placeholder")[-1]
    inputs, taps = list(example_inputs), []
    for i, old, weight, main_grad in found:
        name = input_name(old)
        _check(name, weight, main_grad)
        with graph.inserting_after(last):
            last = graph.placeholder(f"main_grad_{i}")
        last._dynamo_source = None  # type: ignore[attr-defined]
        inputs.append(_as_example(main_grad, example_inputs))
        taps.append(Tap(i, name, main_grad.dtype))
        _anchor(graph, copied[old], last, weight.dtype, main_grad.dtype)
    new.recompile()
    return new, inputs, taps


def main_grads_of(args: Sequence[Any], taps: Sequence[Tap]) -> list[Tensor]:
    """The accumulators that belong to a call's weights.

    Raises:
        RuntimeError: one was taken away, or has another dtype now; the graph was compiled for the one before.
    """
    main_grads = []
    for tap in taps:
        main_grad = getattr(args[tap.index], "main_grad", None)
        if main_grad is None or main_grad.dtype != tap.dtype or main_grad.shape != args[tap.index].shape:
            got = "none" if main_grad is None else f"{main_grad.dtype} {tuple(main_grad.shape)}"
            raise RuntimeError(
                f"{tap.name} (or another layer's, which shares its graph): compiled with accumulate_into_main_grad for "
                f"a main_grad of {tap.dtype}, and now it has {got}; attach main_grads of one dtype to all such weights "
                "before the first step, or call torch.compiler.reset() when they change"
            )
        main_grads.append(main_grad)
    return main_grads


def prepare(weight: Tensor) -> None:
    """Before a compiled backward adds to main_grad: start from zero where the trainer says that it shall overwrite."""
    w: Any = weight
    task = current_backward()
    if getattr(w, "overwrite_main_grad", False) and getattr(w, "_gtp_overwritten", None) != task:
        w.main_grad.zero_()
    w._gtp_overwritten = task  # once a backward: another graph's share of it is added


def finish(weight: Tensor) -> None:
    """After it: the flag, and a dummy that adds nothing to whatever it is added to."""
    w: Any = weight
    if not hasattr(w, "_gtp_catches"):
        w._gtp_catches = w.register_hook(functools.partial(_catch, weakref.ref(w)))
    w.grad_added_to_main_grad = True
    if w.grad is None:
        w.grad = _dummy(w)


def _dummy(w: Tensor) -> Tensor:
    """Zeros of the weight's shape in the memory of one number."""
    return torch.zeros((), dtype=w.dtype, device=w.device).expand(w.shape)


def _catch(ref: weakref.ref[Any], grad: Tensor | None) -> Tensor | None:
    """Tensor hook: what eager code adds beside a compiled graph. The flag would make the trainer overlook it."""
    w = ref()
    if grad is None or w is None or not getattr(w, "grad_added_to_main_grad", False):
        return None
    with torch.no_grad():
        w.main_grad.add_(grad)
    # Autograd adds in place, and all elements of a dummy are one number.
    if w.grad is not None and w.grad.untyped_storage().nbytes() < w.grad.numel() * w.grad.itemsize:
        w.grad = None
    return _dummy(grad)


def _is_plain_weight(weight: Any) -> bool:
    return (
        isinstance(weight, Tensor)
        and not isinstance(weight, ComputeLeaf)
        and weight.is_leaf
        and weight.requires_grad
        and not is_distributed_weight(weight)
        and isinstance(getattr(weight, "main_grad", None), Tensor)
    )


def _check(name: str, weight: Tensor, main_grad: Tensor) -> None:
    check_main_grad_dtype(main_grad.dtype, name)
    if main_grad.shape != weight.shape or main_grad.device != weight.device or main_grad.requires_grad:
        raise ValueError(
            f"{name}: its main_grad has shape {tuple(main_grad.shape)} on {main_grad.device}; to accumulate into "
            f"it, it must have the weight's, {tuple(weight.shape)} on {weight.device}, and require no gradient"
        )


def _as_example(main_grad: Tensor, example_inputs: Sequence[Any]) -> Tensor:
    """`main_grad` as the other examples are: real, or fake in the mode of the capture (with fixed sizes)."""
    mode = next((m for x in example_inputs if (m := getattr(x, "fake_mode", None)) is not None), None)
    return main_grad if mode is None else mode.from_tensor(main_grad, static_shapes=True)


def _anchor(
    graph: fx.Graph, weight: fx.Node, main_grad: fx.Node, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    users = list(weight.users)
    with graph.inserting_after(main_grad):
        # One rank, so that nothing travels; torch takes an empty list of names for a list of tensors.
        args = ([weight], [main_grad], ["none"], [1], REPLICATED, 0, "sum", param_dtype, grad_dtype)
        anchor = graph.call_function(torch.ops.gtp.materialize.default, args)
    for user in users:
        user.replace_input_with(weight, anchor)
