"""Grouped linear as a loop over experts."""

from torch import Tensor

from gtp_compile.kernels.expert_slices import expert_slices


def grouped_linear_reference(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `y_e = x_e @ weight[e]^T + bias[e]` [R, N] with one float32 matmul per expert with rows; tail zero."""
    rows = x.shape[0]
    y = x.new_zeros((rows, weight.shape[1]))
    for expert, routed in enumerate(expert_slices("gtp::grouped_linear", offs, rows)):
        if routed.start < routed.stop:
            product = x[routed].float() @ weight[expert].float().t()
            y[routed] = product if bias is None else product + bias[expert].float()
    return y
