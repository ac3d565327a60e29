"""Accumulating grouped wgrad as a loop over experts."""

from torch import Tensor

from gtp_compile.kernels.expert_slices import expert_slices


def grouped_wgrad_add_reference(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    """Compute `main_grad[e] += dy_e^T @ x_e` [E, N, K] with one float32 matmul per expert that has rows."""
    for expert, routed in enumerate(expert_slices("gtp::grouped_wgrad_add_", offs, dy.shape[0])):
        if routed.start < routed.stop:
            main_grad[expert] += dy[routed].float().t() @ x[routed].float()
