"""Weight gradient of a dense layer, or of experts with equally many rows, in the dtype that the caller sums in."""

import torch
from torch import Tensor

import gtp_compile.kernels.dense_wgrad.op  # noqa: F401  (registers the op)
from gtp_compile.kernels.checks import check_operands, check_out, check_same_size
from gtp_compile.kernels.dense_wgrad.reference import dense_wgrad_into_reference

__all__ = ["dense_wgrad", "dense_wgrad_into"]


def dense_wgrad(dy: Tensor, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute `dy^T @ x`, accumulated in float32 and cast once.

    Args:
        dy: [R, N] or [E, R, N], bf16, fp16 or fp32, any strides.
        x: [R, K] or [E, R, K], same dtype and device, any strides.
        out_dtype: bf16, fp16 or fp32; the dtype of `dy` by default.

    Returns:
        [N, K] or [E, N, K], contiguous in `out_dtype`; zero when there are no rows.

    On CUDA a result in the dtype of the operands is an ordinary `torch.mm` (or `bmm`) and follows torch's switches for
    TF32 and reduced-precision reductions. Differentiable in `dy` and `x`.

    Raises:
        TypeError: A dtype is not supported, or those of `dy` and `x` differ.
        ValueError: Ranks, sizes or devices disagree.
    """
    return torch.ops.gtp.dense_wgrad(dy, x, dy.dtype if out_dtype is None else out_dtype)


def dense_wgrad_into(dy: Tensor, x: Tensor, out: Tensor) -> None:
    """Write `dy^T @ x` into `out` [N, K] (any strides), for callers that own the memory; no autograd.

    Nothing of the size of `out` is allocated where `out` is float32, or has the operands' dtype on CUDA.

    Raises:
        TypeError, ValueError: as `dense_wgrad`, and where `out` does not fit.
    """
    name = "gtp_compile.kernels.dense_wgrad_into"
    check_operands(name, dy=(dy, "[R, N]"), x=(x, "[R, K]"))
    check_same_size(name, "R, the number of rows", dy=dy.shape[0], x=x.shape[0])
    check_out(name, out, (dy.shape[1], x.shape[1]), dy)
    if not dy.is_cuda:
        dense_wgrad_into_reference(dy, x, out)
    elif 0 in (dy.shape[0], *out.shape):
        out.zero_()  # the out_dtype overload of mm makes no promise about empty operands
    elif dy.dtype == out.dtype:
        torch.mm(dy.t(), x, out=out)
    elif out.dtype == torch.float32:
        torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.ops.gtp.dense_wgrad(dy, x, out.dtype))
