"""Weight gradients of all experts in one kernel, stored in the dtype that the caller accumulates in."""

from collections.abc import Sequence

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_wgrad.op  # noqa: F401  (registers the op)
from gtp_compile.kernels.checks import check_offs, check_operands, check_out, check_same_size
from gtp_compile.kernels.grouped_wgrad.reference import grouped_wgrad_into_reference

__all__ = ["grouped_wgrad", "grouped_wgrad_into"]


def grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute `dw[e] = dy_e^T @ x_e` for every expert, accumulated in float32 and cast once.

    Args:
        dy: [R, N] bf16, fp16 or fp32, any strides; gradient of the routed rows.
        x: [R, K] same dtype and device, any strides; input of the routed rows.
        offs: [E] int32, same device; cumulative row ends. `offs[-1] < R` is allowed: rows past it are never read.
        out_dtype: bf16, fp16 or fp32; the dtype of `dy` by default.

    Returns:
        [E, N, K] contiguous in `out_dtype`; exactly zero for an expert without rows.

    Bitwise repeatable, and free of host syncs on CUDA. Differentiable in `dy` and `x`.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree; on CPU also offsets that decrease or pass `R`.
    """
    return torch.ops.gtp.grouped_wgrad(dy, x, offs, dy.dtype if out_dtype is None else out_dtype)


def grouped_wgrad_into(dy: Tensor, x: Tensor, offs: Tensor, outs: Tensor | Sequence[Tensor | None]) -> None:
    """Write the weight gradients into memory that the caller owns; no autograd.

    Args:
        dy, x, offs: as for `grouped_wgrad`.
        outs: one `[E, N, K]`, or one `[N, K]` per expert; None where nobody wants that expert's gradient. Each is
            bf16, fp16 or fp32.

    Nothing of the size of a gradient is allocated where the outputs are float32; on CUDA never, where they are also
    contiguous and have one dtype.

    Raises:
        TypeError, ValueError: as `grouped_wgrad`, and where an output does not fit.
    """
    name = "gtp_compile.kernels.grouped_wgrad_into"
    check_operands(name, dy=(dy, "[R, N]"), x=(x, "[R, K]"))
    check_offs(name, offs, "dy", dy)
    check_same_size(name, "R, the number of routed rows", dy=dy.shape[0], x=x.shape[0])
    parts = list(outs.unbind(0)) if isinstance(outs, Tensor) else list(outs)
    check_same_size(name, "E, the number of experts", offs=offs.shape[0], outs=len(parts))
    for part in parts:
        if part is not None:
            check_out(name, part, (dy.shape[1], x.shape[1]), dy)
    if dy.is_cuda:
        from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_into_triton  # Triton exists on Linux only

        grouped_wgrad_into_triton(dy, x, offs, parts)
    else:
        grouped_wgrad_into_reference(dy, x, offs, parts)
