"""Which kernel computes a grouped wgrad on CUDA."""

from typing import Protocol

from torch import Tensor


class Launcher(Protocol):
    """Stores in dw [E, N, K], or adds to it, `dy_e^T @ x_e` of dy [R, N], x [R, K] and offs [E] int32."""

    def __call__(self, dy: Tensor, x: Tensor, offs: Tensor, dw: Tensor, *, accumulate: bool) -> None: ...


def choose_grouped_wgrad(dy: Tensor, x: Tensor, dw: Tensor) -> Launcher:
    """Return the kernel for these operands."""
    # Imported on use: Triton exists on Linux only, and everything but this path works without it.
    from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_triton

    return grouped_wgrad_triton
