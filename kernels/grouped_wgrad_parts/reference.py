"""Grouped wgrad in parts: computed whole, then cut."""

import torch
from torch import Tensor

from gtp_compile.kernels.grouped_wgrad.reference import grouped_wgrad_reference


def grouped_wgrad_parts_reference(
    dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, dim: int, parts: int
) -> Tensor:
    """Compute `dw[e] = dy_e^T @ x_e` and cut `dim` into [parts, E, c, K] or [parts, E, N, c], zeros behind its end."""
    whole = grouped_wgrad_reference(dy, x, offs, out_dtype)
    shape, size = list(whole.shape), whole.shape[dim]
    shape[dim] = chunk = -(-size // parts)
    cut = whole.new_zeros((parts, *shape))
    for part in range(parts):
        begin, end = min(part * chunk, size), min((part + 1) * chunk, size)
        cut[part].narrow(dim, 0, end - begin).copy_(whole.narrow(dim, begin, end - begin))
    return cut
