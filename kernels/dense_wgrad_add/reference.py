"""Accumulating dense wgrad as one float32 matmul (a batched one for experts of equally many rows)."""

from torch import Tensor


def dense_wgrad_add_reference(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Compute `main_grad += dy^T @ x` [N, K] or [E, N, K] in float32."""
    main_grad += dy.float().mT @ x.float()
