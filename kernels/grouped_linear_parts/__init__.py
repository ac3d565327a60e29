"""Linear layer of all experts in one kernel, which reads the weight in the order in which an all-gather leaves it."""

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_linear_parts.op  # noqa: F401  (registers the op)

__all__ = ["grouped_linear_parts"]


def grouped_linear_parts(
    x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, *, bias: Tensor | None = None
) -> Tensor:
    """Compute `y_e = x_e @ w[e]^T + bias[e]`, accumulated in float32 and cast once, for a `w` [E, N, K] in parts.

    Args:
        x: [R, K] bf16, fp16 or fp32, any strides; routed rows, those of one expert adjacent.
        weight: [W, E, c, K] (dim 1) or [W, E, N, c] (dim 2), same dtype and device, any strides (dgrad passes
            `weight.transpose(2, 3)` and the other dim): `w` cut into W parts of c = ceil(size / W). What lies behind
            the end of `size` is never used.
        offs: [E] int32, same device; cumulative row ends. `offs[-1] < R` is allowed.
        dim: 1 where N is cut, 2 where K is.
        size: N or K, whichever is cut.
        bias: [E, N] in the dtype of `x`.

    Returns:
        [R, N] contiguous in the dtype of `x`. Rows past `offs[-1]` are exactly zero, and never read from `x`.

    Bitwise repeatable, and free of host syncs on CUDA. Not differentiable.

    Raises:
        TypeError: A dtype is not supported, or they differ.
        ValueError: Ranks, sizes or devices disagree, `dim` is out of range; on CPU also offsets that decrease or pass
            `R`.
    """
    return torch.ops.gtp.grouped_linear_parts(x, weight, offs, dim, size, bias)
