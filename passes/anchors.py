"""The anchor ops: how a weight stands in a graph until the collectives are inserted.

    gtp::materialize   the full weight of a group, from its shards. The getter of a sharded module calls it.
    gtp::finalize      the reduced gradients of a group, from the full gradient. The backward of the former.
    gtp::widen         a gradient that arrived rounded, cast before it is summed; says so once, with the name.
    gtp::record        hands the operands of a wgrad GEMM to `verify` (only in graphs compiled for it).

`materialize` and `finalize` carry everything a pass decides on as constants (never a layer's name: equal layers share
one graph), so the compile caches, which are keyed by the graph, can tell two configurations apart. Run eagerly they
do what they stand for, with the same code that the pass emits.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gtp_compile.passes.collective_ops import Layout, emit_gather, emit_reduce
from gtp_compile.passes.emit import Emit, RunEmit

__all__ = ["Finalize", "Materialize", "emit_of", "finalize", "materialize"]

log = logging.getLogger(__name__)

_LIB = torch.library.Library("gtp", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LAYOUT = "str[] group_names, int[] group_sizes, int dim, int full_size, str reduce_op"

_LIB.define(
    f"materialize(Tensor[] shards, Tensor?[] main_grads, {_LAYOUT}, ScalarType param_dtype, ScalarType grad_dtype)"
    " -> Tensor",
    tags=_TAGS,
)
_LIB.define(
    f"finalize(Tensor grad, Tensor[] shards, Tensor?[] main_grads, {_LAYOUT}, ScalarType grad_dtype) -> Tensor[]",
    tags=_TAGS,
)
_LIB.define("widen(Tensor grad, Tensor shard, ScalarType dtype) -> Tensor", tags=_TAGS)
_LIB.define("record(Tensor grad, Tensor shard, Tensor[] operands, int program) -> Tensor", tags=_TAGS)


def materialize(
    shards: Sequence[Tensor],
    main_grads: Sequence[Tensor | None],
    layout: Layout,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Tensor:
    """The full weight of a group: `[*full]`, or `[members, *full]` for several members, in `param_dtype`.

    Differentiable in `shards`. The gradient of a shard has the local shape, was summed over the group in `grad_dtype`,
    and in a compiled graph goes to the shard's `main_grad` where it has one.
    """
    constants = _constants(layout)
    return torch.ops.gtp.materialize.default(list(shards), list(main_grads), *constants, param_dtype, grad_dtype)


def finalize(
    grad: Tensor,
    shards: Sequence[Tensor],
    main_grads: Sequence[Tensor | None],
    layout: Layout,
    grad_dtype: torch.dtype,
) -> list[Tensor]:
    """The reduced gradients of a group's shards (local shapes), from the full gradient that
    `materialize` is differentiated with; warns, once a weight, where it comes narrower than `grad_dtype`.
    """
    return torch.ops.gtp.finalize.default(grad, list(shards), list(main_grads), *_constants(layout), grad_dtype)


def _constants(layout: Layout) -> tuple[Any, ...]:
    return list(layout.group_names), list(layout.group_sizes), layout.dim, layout.full_size, layout.reduce_op


def emit_of(shards: list[Tensor]) -> Emit:
    """How this weight's collectives are run outside a compiled graph; `explain` replaces it by one that stays local."""
    return getattr(shards[0], "emit", None) or RunEmit()


def _materialize_impl(
    shards: list[Tensor],
    main_grads: list[Tensor | None],
    group_names: list[str],
    group_sizes: list[int],
    dim: int,
    full_size: int,
    reduce_op: str,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Tensor:
    layout = Layout.of(group_names, group_sizes, dim, full_size, reduce_op)
    full = emit_gather(emit_of(shards), shards, layout, param_dtype)
    # An op may not return its input (a replicated weight that needs no cast is one).
    return full.clone() if len(shards) == 1 and full is shards[0] else full


def _materialize_fake(
    shards: list[Tensor],
    main_grads: list[Tensor | None],
    group_names: list[str],
    group_sizes: list[int],
    dim: int,
    full_size: int,
    reduce_op: str,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Tensor:
    if len(shards) != len(main_grads):
        raise ValueError(f"materialize: {len(shards)} shards but {len(main_grads)} main_grads; give one (or None) each")
    shape = list(shards[0].shape)
    if dim >= 0:
        shape[dim] = full_size
    if len(shards) > 1:
        shape = [len(shards), *shape]
    return shards[0].new_empty(shape, dtype=param_dtype)


def _finalize_impl(
    grad: Tensor,
    shards: list[Tensor],
    main_grads: list[Tensor | None],
    group_names: list[str],
    group_sizes: list[int],
    dim: int,
    full_size: int,
    reduce_op: str,
    grad_dtype: torch.dtype,
) -> list[Tensor]:
    layout = Layout.of(group_names, group_sizes, dim, full_size, reduce_op)
    if grad.dtype != grad_dtype and grad.dtype.itemsize < grad_dtype.itemsize and grad.ndim > 1:
        _warn_rounded(shards[0], grad.dtype, grad_dtype)
    reduced = emit_reduce(emit_of(shards), grad, shards, layout, grad_dtype)
    dtypes = [_result_dtype(s, m) for s, m in zip(shards, main_grads, strict=True)]
    # Members of a group are views of one buffer, and a group of one may be the incoming gradient itself.
    return [r.to(dtype, copy=True) for r, dtype in zip(reduced, dtypes, strict=True)]


def _finalize_fake(
    grad: Tensor,
    shards: list[Tensor],
    main_grads: list[Tensor | None],
    group_names: list[str],
    group_sizes: list[int],
    dim: int,
    full_size: int,
    reduce_op: str,
    grad_dtype: torch.dtype,
) -> list[Tensor]:
    return [s.new_empty(s.shape, dtype=_result_dtype(s, m)) for s, m in zip(shards, main_grads, strict=True)]


def _result_dtype(shard: Tensor, main_grad: Tensor | None) -> torch.dtype:
    """A gradient on its way to an accumulator is not rounded to the shard's dtype first."""
    return shard.dtype if main_grad is None else torch.promote_types(shard.dtype, main_grad.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Attributes, not save_for_backward: main_grad changes between forward and backward by design, and a saved-tensor
    # hook that copies would make backward accumulate into the copy.
    ctx.shards, ctx.main_grads, *ctx.layout, _, ctx.grad_dtype = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.gtp.finalize.default(grad, ctx.shards, ctx.main_grads, *ctx.layout, ctx.grad_dtype)
    return (
        [g if s.requires_grad else None for g, s in zip(grads, ctx.shards, strict=True)],
        # torch takes a list with a None in it (a member that is frozen, or without main_grad) for no list of tensors.
        None if None in ctx.main_grads else [None] * len(ctx.shards),
        *[None] * 7,
    )


def _widen_impl(grad: Tensor, shard: Tensor, dtype: torch.dtype) -> Tensor:
    _warn_rounded(shard, grad.dtype, dtype)
    return grad.to(dtype, copy=True)


def _warn_rounded(shard: Tensor, got: torch.dtype, want: torch.dtype) -> None:
    """Say once per weight that its gradient was rounded before the sum over ranks."""
    if getattr(shard, "rounding_reported", False):
        return
    name = getattr(shard, "fqn", "a weight")
    log.warning(
        "%s: its weight gradient was rounded to %s before the sum over ranks in %s; its GEMM is not in the same "
        "compiled graph as its use, or has a form that no pass knows. gtp_compile.explain(model) says which.",
        name, got, want,
    )  # fmt: skip
    shard.rounding_reported = True  # type: ignore[attr-defined]


def _record_impl(grad: Tensor, shard: Tensor, operands: list[Tensor], program: int) -> Tensor:
    recorder = getattr(shard, "recorder", None)
    if recorder is not None:
        recorder(shard, program, [o.detach() for o in operands])
    return grad.clone()


for _name, _impl in (
    ("materialize", _materialize_impl),
    ("finalize", _finalize_impl),
    ("widen", _widen_impl),
    ("record", _record_impl),
):
    _LIB.impl(_name, _impl, "CPU")
    _LIB.impl(_name, _impl, "CUDA")
torch.library.register_fake("gtp::materialize", _materialize_fake, lib=_LIB)
torch.library.register_fake("gtp::finalize", _finalize_fake, lib=_LIB)
torch.library.register_fake("gtp::widen", lambda grad, shard, dtype: torch.empty_like(grad, dtype=dtype), lib=_LIB)
torch.library.register_fake("gtp::record", lambda grad, shard, operands, program: torch.empty_like(grad), lib=_LIB)
torch.library.register_autograd("gtp::materialize", _backward, setup_context=_setup_context, lib=_LIB)


@dataclass(frozen=True, slots=True)
class Materialize:
    """A `gtp::materialize` node, its arguments by name."""

    node: fx.Node
    shards: tuple[fx.Node, ...]
    layout: Layout
    param_dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> "Materialize":
        a = node.args
        return cls(node, tuple(a[0]), Layout.of(*a[2:7]), a[7])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Finalize:
    """A `gtp::finalize` node, its arguments by name.

    Attributes:
        grad: the full gradient that arrives.
        shards: the members' shards, leader first; placeholders of the joint graph.
        main_grads: their accumulators, where they have one.
        grad_dtype: the rule's dtype (`weight_grad_dtype`), in which the ranks' gradients are summed.
    """

    node: fx.Node
    grad: fx.Node
    shards: tuple[fx.Node, ...]
    main_grads: tuple[fx.Node | None, ...]
    layout: Layout
    grad_dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> "Finalize":
        a = node.args
        return cls(node, a[0], tuple(a[1]), tuple(a[2]), Layout.of(*a[3:8]), a[8])  # type: ignore[arg-type]

    @classmethod
    def find(cls, graph: fx.Graph) -> "list[Finalize]":
        """Every gradient anchor, in graph order (the same on all ranks)."""
        return [cls.of(n) for n in graph.find_nodes(op="call_function", target=torch.ops.gtp.finalize.default)]
