"""Weight gradients of all experts in one kernel, stored in the dtype that the caller accumulates in."""

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_wgrad.op  # noqa: F401  (registers the op)

__all__ = ["grouped_wgrad"]


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
