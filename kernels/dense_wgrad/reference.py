"""Dense wgrad as one float32 matmul (a batched one for experts of equally many rows)."""

import torch
from torch import Tensor


def dense_wgrad_reference(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute `dy^T @ x` [N, K] or [E, N, K] in float32 and cast once."""
    return (dy.float().mT @ x.float()).to(out_dtype)
