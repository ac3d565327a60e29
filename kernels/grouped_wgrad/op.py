"""Schema, validation and registrations of `gtp::grouped_wgrad`."""

from typing import Any

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_offs, check_operands, check_out_dtype, check_same_size
from gtp_compile.kernels.grouped_wgrad.choice import choose_grouped_wgrad
from gtp_compile.kernels.grouped_wgrad.reference import grouped_wgrad_reference

_OP = "gtp::grouped_wgrad"


def _check(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    check_operands(_OP, dy=(dy, "[R, N]"), x=(x, "[R, K]"))
    check_offs(_OP, offs, "dy", dy)
    check_out_dtype(_OP, out_dtype)
    check_same_size(_OP, "R, the number of routed rows", dy=dy.shape[0], x=x.shape[0])


def _cpu(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, offs, out_dtype)
    return grouped_wgrad_reference(dy, x, offs, out_dtype)


def _cuda(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, offs, out_dtype)
    dw = dy.new_empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)
    if dw.numel():
        choose_grouped_wgrad(dy, x, dw)(dy, x, offs, dw, accumulate=False)
    return dw


def _fake(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, offs, out_dtype)
    return dy.new_empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    dy, x, offs, _ = inputs
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    ctx.save_for_backward(dy if needs_x else None, x if needs_dy else None, offs)


def _backward(ctx: Any, d_dw: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    """Differentiate once more (gradient penalties): the op is bilinear, so both halves are grouped linears."""
    dy, x, offs = ctx.saved_tensors
    d_dy = None if x is None else torch.ops.gtp.grouped_linear(x, d_dw.to(x.dtype), offs)
    d_x = None if dy is None else torch.ops.gtp.grouped_linear(dy, d_dw.to(dy.dtype).transpose(1, 2), offs)
    return d_dy, d_x, None, None


torch.library.define(_OP, "(Tensor dy, Tensor x, Tensor offs, ScalarType out_dtype) -> Tensor", tags=OP_TAGS)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
