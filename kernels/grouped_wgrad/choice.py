"""Which kernel computes a grouped wgrad on CUDA."""

from typing import Protocol

import torch
from torch import Tensor

from gtp_compile.kernels.capability import has_gluon, has_rows_apart, is_aligned, is_hopper

_PIECE = 64  # rows and columns that the Gluon kernel stores at once


class Launcher(Protocol):
    """Stores in dw [E, N, K], or adds to it, `dy_e^T @ x_e` of dy [R, N], x [R, K] and offs [E] int32.

    With split_dim, it stores in parts: dw is contiguous [W, E, c, K] (1) or [W, E, N, c] (2), zeros behind the end.
    """

    def __call__(
        self, dy: Tensor, x: Tensor, offs: Tensor, dw: Tensor, *, accumulate: bool, split_dim: int = 0
    ) -> None: ...


def choose_grouped_wgrad(dy: Tensor, x: Tensor, dw: Tensor, split_dim: int = 0) -> Launcher:
    """Return the kernel for these operands; split_dim as for the `Launcher`.

    It depends on the GPU, the installed Triton, dtypes, strides and alignment, and on neither the number of rows nor
    their split: the two kernels sum in different orders, and ranks or steps must not differ by that.
    """
    # Imported on use: Triton exists on Linux only, and Gluon in some of its versions only.
    if has_gluon() and is_hopper(dw.device) and _suits_tma(dy, x, dw) and _is_split_at_pieces(dw, split_dim):
        from gtp_compile.kernels.grouped_wgrad.gluon import grouped_wgrad_gluon

        return grouped_wgrad_gluon
    from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_triton

    return grouped_wgrad_triton


def _suits_tma(dy: Tensor, x: Tensor, dw: Tensor) -> bool:
    """Tell whether the tensor cores multiply the operands, and TMA can address all three tensors."""
    if dy.dtype not in (torch.bfloat16, torch.float16):
        return False
    # Where K is no multiple of 8, TMA was seen to write past the ends of rows.
    if dw.shape[-1] % 8:
        return False
    return (
        all(tensor.stride(-1) == 1 and is_aligned(tensor) for tensor in (dy, x, dw))
        and has_rows_apart(dy)
        and has_rows_apart(x)
    )


def _is_split_at_pieces(dw: Tensor, split_dim: int) -> bool:
    return split_dim == 0 or dw.shape[1 + split_dim] % _PIECE == 0
