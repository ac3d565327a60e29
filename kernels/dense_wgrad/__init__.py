"""Weight gradient of a dense layer, or of experts with equally many rows, in the dtype that the caller sums in."""

import torch
from torch import Tensor

import gtp_compile.kernels.dense_wgrad.op  # noqa: F401  (registers the op)

__all__ = ["dense_wgrad"]


def dense_wgrad(dy: Tensor, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute `dy^T @ x`, accumulated in float32 and cast once.

    Args:
        dy: [R, N] or [E, R, N], bf16, fp16 or fp32, any strides.
        x: [R, K] or [E, R, K], same dtype and device, any strides.
        out_dtype: bf16, fp16 or fp32; the dtype of `dy` by default.

    Returns:
        [N, K] or [E, N, K], contiguous in `out_dtype`; zero when there are no rows.

    On CUDA a result in the dtype of the operands is an ordinary `torch.mm` (or `bmm`) and follows torch's switches for
    TF32 and reduced-precision reductions. Differentiable in `dy` and `x`.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree.
    """
    return torch.ops.gtp.dense_wgrad(dy, x, dy.dtype if out_dtype is None else out_dtype)
