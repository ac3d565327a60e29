"""Weight gradients of all experts in one kernel, added to the buffer where a trainer sums them."""

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_wgrad_add.op  # noqa: F401  (registers the op)

__all__ = ["grouped_wgrad_add_"]


def grouped_wgrad_add_(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    """Compute `main_grad[e] += dy_e^T @ x_e` for every expert, in float32 throughout.

    Args:
        main_grad: [E, N, K] fp32, changed in place; any strides that do not overlap.
        dy: [R, N] bf16, fp16 or fp32, same device, any strides; gradient of the routed rows.
        x: [R, K] same dtype and device as `dy`, any strides; input of the routed rows.
        offs: [E] int32, same device; cumulative row ends. `offs[-1] < R` is allowed: rows past it are never read.

    The gradient of an expert without rows stays as it is, bit by bit. For a weight kept as [E, K, N], swap
    `dy` and `x`.

    Bitwise repeatable, and free of host syncs on CUDA. Not differentiable.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree; on CPU also offsets that decrease or pass `R`.
    """
    torch.ops.gtp.grouped_wgrad_add_(main_grad, dy, x, offs)
