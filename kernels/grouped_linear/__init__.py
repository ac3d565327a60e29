"""Linear layer of all experts in one kernel, with gradients."""

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_linear.op  # noqa: F401  (registers the op)

__all__ = ["grouped_linear"]


def grouped_linear(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute `y_e = x_e @ weight[e]^T` for the rows of every expert, accumulated in float32 and cast once.

    Args:
        x: [R, K] bf16, fp16 or fp32, any strides; routed rows, those of one expert adjacent.
        weight: [E, N, K] same dtype and device, any strides (dgrad passes a transposed view).
        offs: [E] int32, same device; cumulative row ends. `offs[-1] < R` is allowed.

    Returns:
        [R, N] contiguous in the dtype of `x`. Rows past `offs[-1]` are exactly zero, and never read from `x`.

    Differentiable in `x` (another grouped linear) and `weight` (a grouped wgrad in the dtype of `weight`).
    No host sync on CUDA, in either direction.

    Raises:
        TypeError: A dtype is not supported, or those of `x` and `weight` differ.
        ValueError: Ranks, sizes or devices disagree; on CPU also offsets that decrease or pass `R`.
    """
    return torch.ops.gtp.grouped_linear(x, weight, offs)
