"""Which kernel computes a grouped linear on CUDA."""

from typing import Protocol

import torch
from torch import Tensor

from gtp_compile.kernels.capability import has_gluon, has_rows_apart, is_aligned, is_hopper

_BLOCK_K = 64  # features that the Gluon kernel multiplies, and out features that it reads, in one piece

# Elements of an expert's weight up to which the Gluon kernel outran torch's on an H200, in forward and backward: those
# of Qwen3-30B-A3B have 3 and 1.5 million. Above, it was at best even (DeepSeek-V3: 29 and 15; benchmarks/RESULTS.md).
_SMALL_EXPERT = 1 << 22

_HALF_DTYPES = (torch.bfloat16, torch.float16)


class Launcher(Protocol):
    """Stores `x_e @ weight[e]^T + bias[e]` in y [R, N]; x [R, K], weight [E, N, K], offs [E] int32, bias [E, N].

    With split_dim, the weight lies in parts: [W, E, c, K] (1) or [W, E, N, c] (2).
    """

    def __call__(
        self, x: Tensor, weight: Tensor, offs: Tensor, y: Tensor, bias: Tensor | None = None, split_dim: int = 0
    ) -> None: ...


def choose_grouped_linear(x: Tensor, weight: Tensor, y: Tensor, split_dim: int = 0) -> Launcher:
    """Return the kernel for these operands.

    It depends on the GPU, the installed Triton, dtypes, strides and alignment, and on neither the number of rows nor
    their split.
    """
    # Imported on use: Triton exists on Linux only, and Gluon in some of its versions only.
    if has_gluon() and is_hopper(x.device) and _suits_tma(x, weight, y) and _is_split_at_pieces(x, weight, split_dim):
        from gtp_compile.kernels.grouped_linear.gluon import grouped_linear_gluon

        return grouped_linear_gluon
    from gtp_compile.kernels.grouped_linear.triton import grouped_linear_triton

    return grouped_linear_triton


def outruns_torch(x: Tensor, weight: Tensor) -> bool:
    """Tell whether this op is faster than `torch._grouped_mm` for a whole weight [E, N, K]. For fake tensors, too."""
    if x.device.type != "cuda" or x.dtype not in _HALF_DTYPES:
        return False
    if not _has_torch_a_kernel(x):
        return True  # it loops over the experts, and waits for their counts on the host
    _, out_features, in_features = weight.shape
    return (
        _has_gluon_kernel(x)
        and out_features % 8 == 0
        and 1 in weight.stride()[1:]
        and out_features * in_features <= _SMALL_EXPERT
    )


def why_not_in_parts(x: Tensor, weight: Tensor, split_dim: int) -> str:
    """Say why a weight in parts would cost more than a whole one, or "". For fake tensors, too.

    Where there is a fast kernel for whole weights (ours or torch's), parts must suit ours: the plain one is slower.
    """
    if x.device.type != "cuda" or not (_has_torch_a_kernel(x) or _has_gluon_kernel(x)):
        return ""
    if not _has_gluon_kernel(x):
        return "torch is fast here, and the kernel that reads parts as fast needs Hopper and Triton 3.6"
    if not _is_split_at_pieces(x, weight, split_dim):
        chunk, size = weight.shape[split_dim + 1], (0, weight.shape[2], x.shape[1])[split_dim]
        return f"parts of {chunk} (of {size} in all) are no whole tiles of {_BLOCK_K}"
    return ""


def _has_torch_a_kernel(x: Tensor) -> bool:
    """Tell whether torch's grouped GEMM is a kernel, and not a loop over the experts. (ROCm may have one.)"""
    if torch.version.hip is not None:
        return True
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _has_gluon_kernel(x: Tensor) -> bool:
    return x.dtype in _HALF_DTYPES and is_hopper(x.device) and has_gluon()


def _suits_tma(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    if x.dtype not in _HALF_DTYPES or 0 in (*x.shape, *weight.shape):
        return False
    stored = weight if weight.stride(-1) == 1 else weight.transpose(-1, -2)
    # Where N is no multiple of 8, TMA was seen to write past the ends of rows.
    return (
        y.shape[1] % 8 == 0
        and all(tensor.stride(-1) == 1 and is_aligned(tensor) for tensor in (x, stored, y))
        and has_rows_apart(x)
    )


def _is_split_at_pieces(x: Tensor, weight: Tensor, split_dim: int) -> bool:
    """Tell whether no piece of the weight lies in two parts, nor behind the end where it is multiplied."""
    if split_dim == 0:
        return True
    chunk = weight.shape[split_dim + 1]
    return chunk % _BLOCK_K == 0 and (split_dim == 1 or weight.shape[0] * chunk == x.shape[1])
