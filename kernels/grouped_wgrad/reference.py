"""Grouped wgrad as a loop over experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtp_compile.kernels.dense_wgrad.reference import dense_wgrad_into_reference
from gtp_compile.kernels.expert_slices import expert_slices


def grouped_wgrad_reference(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute `dw[e] = dy_e^T @ x_e` [E, N, K] with one float32 matmul per expert that has rows."""
    (rows, n), k = dy.shape, x.shape[1]
    dw = dy.new_zeros((offs.shape[0], n, k), dtype=out_dtype)
    for expert, routed in enumerate(expert_slices("gtp::grouped_wgrad", offs, rows)):
        if routed.start < routed.stop:
            dw[expert] = dy[routed].float().t() @ x[routed].float()
    return dw


def grouped_wgrad_into_reference(dy: Tensor, x: Tensor, offs: Tensor, outs: Sequence[Tensor | None]) -> None:
    """Write `dy_e^T @ x_e` into `outs[e]` [N, K] for every expert that has one."""
    for out, routed in zip(outs, expert_slices("gtp::grouped_wgrad", offs, dy.shape[0]), strict=True):
        if out is None:
            continue
        if routed.start < routed.stop:
            dense_wgrad_into_reference(dy[routed], x[routed], out)
        else:
            out.zero_()
