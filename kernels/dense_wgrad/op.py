"""Schema, validation and registrations of `gtp::dense_wgrad`. cuBLAS is the CUDA kernel; there is no Triton one."""

from typing import Any

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_operands, check_out_dtype, check_same_size
from gtp_compile.kernels.dense_wgrad.reference import dense_wgrad_reference

_OP = "gtp::dense_wgrad"


def _check(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> None:
    batch = "E, " if dy.ndim == 3 else ""
    check_operands(_OP, dy=(dy, f"[{batch}R, N]"), x=(x, f"[{batch}R, K]"))
    check_out_dtype(_OP, out_dtype)
    check_same_size(_OP, "R, the number of rows", dy=dy.shape[-2], x=x.shape[-2])
    if batch:
        check_same_size(_OP, "E, the number of experts", dy=dy.shape[0], x=x.shape[0])


def _cpu(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, out_dtype)
    return dense_wgrad_reference(dy, x, out_dtype)


def _cuda(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, out_dtype)
    if 0 in (*dy.shape, x.shape[-1]):
        # The out_dtype overloads make no promise about empty operands.
        return dy.new_zeros(_shape(dy, x), dtype=out_dtype)
    multiply = torch.mm if dy.ndim == 2 else torch.bmm
    if dy.dtype == out_dtype:
        return multiply(dy.mT, x)
    if dy.dtype == torch.float32:
        return multiply(dy.mT, x).to(out_dtype)
    return multiply(dy.mT, x, out_dtype=torch.float32).to(out_dtype)


def _fake(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(dy, x, out_dtype)
    return dy.new_empty(_shape(dy, x), dtype=out_dtype)


def _shape(dy: Tensor, x: Tensor) -> tuple[int, ...]:
    return *dy.shape[:-2], dy.shape[-1], x.shape[-1]


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    dy, x, _ = inputs
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    ctx.save_for_backward(dy if needs_x else None, x if needs_dy else None)


def _backward(ctx: Any, d_dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    dy, x = ctx.saved_tensors
    d_dy = None if x is None else x @ d_dw.to(x.dtype).mT
    d_x = None if dy is None else dy @ d_dw.to(dy.dtype)
    return d_dy, d_x, None


torch.library.define(_OP, "(Tensor dy, Tensor x, ScalarType out_dtype) -> Tensor", tags=OP_TAGS)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
