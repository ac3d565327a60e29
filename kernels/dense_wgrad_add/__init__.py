"""Weight gradient of a dense layer, or of experts with equally many rows, added to what a trainer has summed so far."""

import torch
from torch import Tensor

import gtp_compile.kernels.dense_wgrad_add.op  # noqa: F401  (registers the op)

__all__ = ["dense_wgrad_add_"]


def dense_wgrad_add_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Compute `main_grad += dy^T @ x`, in float32 throughout.

    Args:
        main_grad: [N, K] or [E, N, K] fp32, changed in place; any strides that do not overlap.
        dy: [R, N] or [E, R, N], bf16, fp16 or fp32, same device, any strides.
        x: [R, K] or [E, R, K], same dtype and device as `dy`, any strides.

    Without rows nothing changes. For a weight kept as [K, N], swap `dy` and `x`. On CUDA, float32 operands follow
    torch's switch for TF32. Not differentiable.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree.
    """
    torch.ops.gtp.dense_wgrad_add_(main_grad, dy, x)
