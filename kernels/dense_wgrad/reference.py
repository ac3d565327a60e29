"""Dense wgrad as one float32 matmul (a batched one for experts of equally many rows)."""

import torch
from torch import Tensor


def dense_wgrad_reference(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute `dy^T @ x` [N, K] or [E, N, K] in float32 and cast once."""
    return (dy.float().mT @ x.float()).to(out_dtype)


def dense_wgrad_into_reference(dy: Tensor, x: Tensor, out: Tensor) -> None:
    """Write `dy^T @ x` into `out` [N, K], computed in float32 and cast once."""
    if out.dtype == torch.float32:
        torch.mm(dy.float().t(), x.float(), out=out)
    else:
        out.copy_(dy.float().t() @ x.float())
