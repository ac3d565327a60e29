"""Schema, validation and registrations of `gtp::grouped_wgrad_parts`. Its CUDA kernels are those of the whole form."""

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_offs, check_operands, check_out_dtype, check_same_size
from gtp_compile.kernels.grouped_wgrad.choice import choose_grouped_wgrad
from gtp_compile.kernels.grouped_wgrad_parts.reference import grouped_wgrad_parts_reference

_OP = "gtp::grouped_wgrad_parts"


def _check(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, dim: int, parts: int) -> None:
    check_operands(_OP, dy=(dy, "[R, N]"), x=(x, "[R, K]"))
    check_offs(_OP, offs, "dy", dy)
    check_out_dtype(_OP, out_dtype)
    check_same_size(_OP, "R, the number of routed rows", dy=dy.shape[0], x=x.shape[0])
    if dim not in (1, 2):
        raise ValueError(f"{_OP}: dim must be 1 (N) or 2 (K) of [E, N, K], got {dim}; use a view to cut the experts")
    if parts < 1:
        raise ValueError(f"{_OP}: parts must be at least 1, got {parts}; pass the number of ranks that hold a part")


def _cpu(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, dim: int, parts: int) -> Tensor:
    _check(dy, x, offs, out_dtype, dim, parts)
    return grouped_wgrad_parts_reference(dy, x, offs, out_dtype, dim, parts)


def _cuda(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, dim: int, parts: int) -> Tensor:
    dw = _fake(dy, x, offs, out_dtype, dim, parts)
    if dw.numel():
        choose_grouped_wgrad(dy, x, dw, dim)(dy, x, offs, dw, accumulate=False, split_dim=dim)
    return dw


def _fake(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, dim: int, parts: int) -> Tensor:
    _check(dy, x, offs, out_dtype, dim, parts)
    part = [offs.shape[0], dy.shape[1], x.shape[1]]
    part[dim] = -(-part[dim] // parts)
    return dy.new_empty((parts, *part), dtype=out_dtype)


torch.library.define(
    _OP, "(Tensor dy, Tensor x, Tensor offs, ScalarType out_dtype, int dim, int parts) -> Tensor", tags=OP_TAGS
)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
