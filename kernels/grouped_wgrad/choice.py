"""Which kernel computes a grouped wgrad on CUDA."""

from typing import Protocol

import torch
from torch import Tensor

# Versions on whose output the GPU tests have run. The kernel compiles with newer ones too, but Gluon is experimental:
# after `pytest -m gpu tests/kernels` with one of them, it may be added here.
_GLUON_TRITONS = ((3, 6),)

_TMA_ALIGNMENT = 16  # bytes
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


def has_gluon() -> bool:
    """Tell whether the installed Triton is one on which the Gluon kernels have been tested."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in _GLUON_TRITONS


def is_hopper(device: torch.device) -> bool:
    """Tell whether a device has Hopper's tensor cores."""
    # ROCm counts its capabilities in numbers of its own, 9.4 among them.
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


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


def is_aligned(tensor: Tensor) -> bool:
    """Tell whether TMA can address a tensor: its start and all strides but the last are multiples of 16 bytes."""
    outer = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    return not any(offset % _TMA_ALIGNMENT for offset in (tensor.data_ptr(), *outer))


def has_rows_apart(matrix: Tensor) -> bool:
    """Tell whether no two rows overlap."""
    return matrix.stride(0) >= matrix.shape[1]
