"""Grouped linear over a weight in parts: joined, then multiplied."""

from torch import Tensor

from gtp_compile.kernels.grouped_linear.reference import grouped_linear_reference


def grouped_linear_parts_reference(
    x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, bias: Tensor | None
) -> Tensor:
    """Compute `y_e = x_e @ w[e]^T + bias[e]` [R, N] with `w` [E, N, K] joined from [W, E, c, K] or [W, E, N, c]."""
    whole = weight.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    return grouped_linear_reference(x, whole, offs, bias)
