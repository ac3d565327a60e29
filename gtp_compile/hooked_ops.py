"""Linears over weights of another tool's making: their protocol hooks run inside opaque ops, at run time.

    gtp::hooked_linear   materialize_group_for_forward, then the forward GEMM
    gtp::hooked_dgrad    materialize_group_for_backward, then the GEMM of the input's gradient
    gtp::hooked_wgrad    grad_buffer of the members, the wgrad GEMM into those, then finalize_group_grads

The hooks may communicate, so a graph holds them in an order that all ranks share (`order_collectives`), and never
repeats one (`recompute_gathers`). A hook and its GEMM are one op: the full weight and the full gradient are the
implementer's memory, which no compiler may reuse, save or copy.

Everything about a weight is read from the objects themselves when the op runs, so a main_grad that is attached,
replaced or typed anew counts at once, and equal layers share one graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtp_compile._compat import CUDAGRAPH_UNSAFE, DisableTorchFunctionSubclass, is_asked_for
from gtp_compile.kernels import dense_wgrad_into, grouped_linear, grouped_wgrad_into
from gtp_compile.weights import (
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    weight_grad_buffers,
    weight_grad_dtype,
)

__all__ = ["dry_hooks", "hooked_linear"]

log = logging.getLogger(__name__)

_LIB = torch.library.Library("gtp", "FRAGMENT")
# A captured CUDA graph would replay the GEMMs without their hooks.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout, *CUDAGRAPH_UNSAFE)

for _schema in (
    "hooked_linear(Tensor x, Tensor[] members, Tensor? offs, int out_features, bool cast) -> Tensor",
    "hooked_dgrad(Tensor dy, Tensor[] members, Tensor? offs, int in_features, bool cast) -> Tensor",
    "hooked_wgrad(Tensor dy, Tensor x, Tensor[] members, Tensor? offs) -> Tensor[]",
):
    _LIB.define(_schema, tags=_TAGS)


def hooked_linear(
    x: Tensor, members: Sequence[Tensor], offs: Tensor | None, out_features: int, *, cast: bool = False
) -> Tensor:
    """`x @ w^T` for a weight group whose leader `members[0]` bears another tool's protocol. Differentiable.

    Args:
        x: `[R, K]`.
        members: the group as registered (shards, or whatever the tool keeps), leader first.
        offs: int32 `[E]`, the cumulative ends of each layer's rows; None for a dense weight.
        out_features: N of the full weights `[N, K]` (or of the one stacked weight `[E, N, K]`).
        cast: cast what the hooks return to x's dtype (autocast); otherwise another dtype is refused.

    Returns:
        `[R, N]` in x's dtype.
    """
    # The implementers may be any subclass; its __torch_function__ is not asked about our op, nor wraps its result.
    with DisableTorchFunctionSubclass():
        return torch.ops.gtp.hooked_linear.default(x, list(members), offs, out_features, cast)


def dry_hooks() -> dict[Any, Any]:
    """For each op a stand-in that runs no hook: right shapes and dtypes, zeros."""
    ops = torch.ops.gtp
    return {
        ops.hooked_linear.default: lambda *args: torch.zeros_like(_linear_fake(*args)),
        ops.hooked_dgrad.default: lambda *args: torch.zeros_like(_dgrad_fake(*args)),
        ops.hooked_wgrad.default: lambda *args: [torch.zeros_like(g) for g in _wgrad_fake(*args)],
    }


def _linear_impl(x: Tensor, members: list[Tensor], offs: Tensor | None, out_features: int, cast: bool) -> Tensor:
    _check_identity(members)
    full = materialize_weight_for_forward(members)
    shape = _full_shape(members, offs, out_features, x.shape[1])
    return _multiply(x, _checked(full, shape, x.dtype, cast, members), offs)


def _dgrad_impl(dy: Tensor, members: list[Tensor], offs: Tensor | None, in_features: int, cast: bool) -> Tensor:
    _check_identity(members)
    full = materialize_weight_for_backward(members)
    shape = _full_shape(members, offs, dy.shape[1], in_features)
    return _multiply(dy, [w.mT for w in _checked(full, shape, dy.dtype, cast, members)], offs)


def _wgrad_impl(dy: Tensor, x: Tensor, members: list[Tensor], offs: Tensor | None) -> list[Tensor]:
    _check_identity(members)
    # Frozen members, and those that this backward was not asked for, get no GEMM, and None in the leader's list.
    wanted = [m.requires_grad and is_asked_for(m) for m in members]
    if not any(wanted):
        return [torch.zeros_like(m, requires_grad=False) for m in _plain(members)]
    grads = _buffers(members, wanted, _full_shape(members, offs, dy.shape[1], x.shape[1]), dy)
    with torch.autocast(dy.device.type, enabled=False):
        if offs is None:
            assert grads[0] is not None
            dense_wgrad_into(dy, x, grads[0])
        else:
            grouped_wgrad_into(dy, x, offs, grads[0] if grads[0] is not None and grads[0].ndim == 3 else grads)
    # Flags of an earlier microbatch would make a gradient that comes back now look like a dummy.
    flagged = [hasattr(m, "grad_added_to_main_grad") for m in members]
    for member, has_flag in zip(members, flagged, strict=True):
        if has_flag:
            member.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    finalized = finalize_weight_grads(members, grads)
    return [_returned(m, g, i, members[0]) for i, (m, g) in enumerate(zip(members, finalized, strict=True))]


def _returned(member: Tensor, grad: Tensor | None, index: int, leader: Tensor) -> Tensor:
    """What autograd gets for one member: its gradient, or zeros where the hook took the gradient away.

    TransformerEngine promises a dummy `.grad` and the flag on members that have one. A dummy is always zeros here:
    whoever adds it to main_grad after all (`zero_out_wgrad`, tied weights) adds nothing.
    """
    if grad is None and hasattr(member, "grad_added_to_main_grad"):
        member.grad_added_to_main_grad = True
    (plain,) = _plain([member])
    if grad is None or getattr(member, "grad_added_to_main_grad", False):
        return torch.zeros_like(plain)
    if grad.shape != plain.shape:
        raise RuntimeError(
            f"finalize_group_grads of a {type(leader).__name__} returned a gradient of shape {tuple(grad.shape)} for "
            f"member {index} of shape {tuple(plain.shape)}; return one of the member's (local) shape, or None where it "
            "went to main_grad"
        )
    if torch.promote_types(grad.dtype, plain.dtype) != plain.dtype and getattr(member, "main_grad", None) is None:
        _warn_once(
            leader,
            f"member {index} of the weight group of a {type(leader).__name__}: finalize_group_grads returned "
            f"{grad.dtype}, and autograd rounds it to the parameter's {plain.dtype}; attach a main_grad to keep it",
        )
    return grad.detach().to(plain.dtype, copy=True)  # an op may not return what somebody else holds


def _buffers(members: list[Tensor], wanted: list[bool], shape: tuple[int, ...], dy: Tensor) -> list[Tensor | None]:
    """Where the wgrad GEMM of each wanted member writes: the buffers they bring, scratch for the others."""
    # The leader speaks for the dtype even when it is frozen; it is not asked for a buffer then.
    asked = [m for m, w in zip(members, wanted, strict=True) if w]
    rule = weight_grad_dtype(members, dy.dtype)
    if wanted[0]:
        buffers = weight_grad_buffers(asked, shape, dy.dtype, dy.device)
    else:
        buffers = [weight_grad_buffers(m, shape, rule, dy.device)[0] for m in asked]
    for buffer in buffers:
        if torch.promote_types(buffer.dtype, rule) != buffer.dtype:
            _warn_once(
                members[0],
                f"a weight group of a {type(members[0]).__name__} brought a grad_buffer of {buffer.dtype}, narrower "
                f"than main_grad's {rule}: its weight gradients are rounded before they are summed over ranks",
            )
    found = iter(buffers)
    return [next(found) if w else None for w in wanted]


def _check_identity(members: list[Tensor]) -> None:
    """Hooks live on Python objects; whoever handed the op a copy of the tensor lost them.

    Raises:
        RuntimeError: the leader that arrived does not bear the protocol.
    """
    if not is_distributed_weight(members[0]):
        raise RuntimeError(
            "gtp::hooked_linear: the leader of a distributed weight group arrived without its protocol (a "
            f"{type(members[0]).__name__}): something between forward and backward replaced the parameter by a copy, "
            "such as a saved-tensor hook (save_on_cpu) in eager, or disable=['recompute_gathers']. Leave parameters "
            "out of it."
        )


def _full_shape(members: list[Tensor], offs: Tensor | None, n: int, k: int) -> tuple[int, ...]:
    """The shape of one member's full weight: `[N, K]`, or `[E, N, K]` for the one weight of stacked layers."""
    return (offs.shape[0], n, k) if offs is not None and len(members) == 1 and members[0].ndim == 3 else (n, k)


def _checked(
    full: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype, cast: bool, members: list[Tensor]
) -> list[Tensor]:
    """The materialized weights, plain, each of the shape and dtype that the GEMM needs.

    Raises:
        RuntimeError: the implementer returned something else.
    """
    name = type(members[0]).__name__
    for index, weight in enumerate(full):
        if tuple(weight.shape) != shape:
            raise RuntimeError(
                f"A {name} materialized a weight of shape {tuple(weight.shape)} for member {index} of its group; the "
                f"GEMM needs the full weight, {shape}"
            )
        if weight.dtype != dtype and not cast:
            raise RuntimeError(
                f"A {name} materialized member {index} of its group in {weight.dtype}, but the input is {dtype}; "
                "materialize in the compute dtype, cast the input, or use torch.autocast"
            )
    return [w.detach().to(dtype) for w in _plain(full)]


def _multiply(x: Tensor, full: list[Tensor], offs: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        if offs is None:
            return x @ full[0].mT
        weight = full[0] if len(full) == 1 and full[0].ndim == 3 else _stacked(full)
        return grouped_linear(x, weight, offs)


def _stacked(full: list[Tensor]) -> Tensor:
    """The weights as `[E, N, K]`; slices of one buffer, as an all-gather leaves them, are not copied."""
    first = full[0]
    storage, offset = first.untyped_storage().data_ptr(), int(first.storage_offset())
    step = int(full[1].storage_offset()) - offset if len(full) > 1 else 0
    alike = all(
        w.untyped_storage().data_ptr() == storage
        and w.stride() == first.stride()
        and w.storage_offset() == offset + i * step
        for i, w in enumerate(full)
    )
    if alike and step >= 0:
        return first.as_strided((len(full), *first.shape), (step, *first.stride()), offset)
    return torch.stack(full)


def _plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory as tensors of no particular class, whose methods nobody overrides."""
    with DisableTorchFunctionSubclass():
        return [t.detach().as_subclass(Tensor) for t in tensors]


def _warn_once(leader: Tensor, message: str) -> None:
    if not getattr(leader, "_gtp_warned", False):
        log.warning("%s", message)
        leader._gtp_warned = True  # type: ignore[attr-defined]


def _linear_fake(x: Tensor, members: list[Tensor], offs: Tensor | None, out_features: int, cast: bool) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


def _dgrad_fake(dy: Tensor, members: list[Tensor], offs: Tensor | None, in_features: int, cast: bool) -> Tensor:
    return dy.new_empty((dy.shape[0], in_features))


def _wgrad_fake(dy: Tensor, x: Tensor, members: list[Tensor], offs: Tensor | None) -> list[Tensor]:
    return [m.new_empty(m.shape) for m in members]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, members, offs, _, cast = inputs
    # As attributes: the hooks live on these very objects, which a saved-tensor hook would replace.
    ctx.members, ctx.cast, ctx.in_features = members, cast, x.shape[1]
    trained = any(m.requires_grad for m in members)
    ctx.save_for_backward(x if trained else None, offs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, offs = ctx.saved_tensors
    members = ctx.members
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.gtp.hooked_dgrad.default(dy, members, offs, ctx.in_features, ctx.cast)
    grads: list[Tensor | None] = [None] * len(members)
    if x is not None:
        made = torch.ops.gtp.hooked_wgrad.default(dy, x, members, offs)
        grads = [g if m.requires_grad else None for g, m in zip(made, members, strict=True)]
    return dx, grads, None, None, None


for _name, _impl, _fake in (
    ("hooked_linear", _linear_impl, _linear_fake),
    ("hooked_dgrad", _dgrad_impl, _dgrad_fake),
    ("hooked_wgrad", _wgrad_impl, _wgrad_fake),
):
    _LIB.impl(_name, _impl, "CPU")
    _LIB.impl(_name, _impl, "CUDA")
    torch.library.register_fake(f"gtp::{_name}", _fake, lib=_LIB)
torch.library.register_autograd("gtp::hooked_linear", _backward, setup_context=_setup_context, lib=_LIB)
