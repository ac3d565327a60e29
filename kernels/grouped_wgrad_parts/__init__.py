"""Weight gradients of all experts in one kernel, stored in the order in which a reduce-scatter sends them."""

import torch
from torch import Tensor

import gtp_compile.kernels.grouped_wgrad_parts.op  # noqa: F401  (registers the op)

__all__ = ["grouped_wgrad_parts"]


def grouped_wgrad_parts(
    dy: Tensor, x: Tensor, offs: Tensor, dim: int, parts: int, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `dw[e] = dy_e^T @ x_e` for every expert and cut `dim` of [E, N, K] into one part for each rank.

    Part p holds the rows (or columns) p * c to (p + 1) * c, with c = ceil(size / parts); what lies past the end is
    exactly zero. The values are those of `grouped_wgrad`, bit by bit where the same kernel computes both.

    Args:
        dy: [R, N] bf16, fp16 or fp32, any strides; gradient of the routed rows.
        x: [R, K] same dtype and device, any strides; input of the routed rows.
        offs: [E] int32, same device; cumulative row ends. `offs[-1] < R` is allowed: rows past it are never read.
        dim: 1 to cut N, 2 to cut K.
        parts: how many parts, at least 1.
        out_dtype: bf16, fp16 or fp32; the dtype of `dy` by default.

    Returns:
        [parts, E, c, K] (dim 1) or [parts, E, N, c] (dim 2), contiguous in `out_dtype`; exactly zero for an expert
        without rows. For a weight kept as [E, K, N], swap `dy` and `x`.

    Bitwise repeatable, and free of host syncs on CUDA. Not differentiable.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree, `dim` or `parts` is out of range; on CPU also offsets that
            decrease or pass `R`.
    """
    return torch.ops.gtp.grouped_wgrad_parts(dy, x, offs, dy.dtype if out_dtype is None else out_dtype, dim, parts)
