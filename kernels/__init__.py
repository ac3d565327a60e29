"""GEMM ops of the MoE training step; importing this package registers all of them under `torch.ops.gtp`.

Every op takes any strides, accumulates in float32 and rounds once, at the store. Those that end in `_add_` add to
their first argument, all others are functional. CPU runs the reference, CUDA runs Triton or cuBLAS, fake tensors get
shapes without guards.
"""

from gtp_compile.kernels.dense_wgrad import dense_wgrad, dense_wgrad_into
from gtp_compile.kernels.dense_wgrad_add import dense_wgrad_add_
from gtp_compile.kernels.grouped_linear import grouped_linear
from gtp_compile.kernels.grouped_linear_parts import grouped_linear_parts
from gtp_compile.kernels.grouped_wgrad import grouped_wgrad, grouped_wgrad_into
from gtp_compile.kernels.grouped_wgrad_add import grouped_wgrad_add_
from gtp_compile.kernels.grouped_wgrad_parts import grouped_wgrad_parts

__all__ = [
    "dense_wgrad",
    "dense_wgrad_add_",
    "dense_wgrad_into",
    "grouped_linear",
    "grouped_linear_parts",
    "grouped_wgrad",
    "grouped_wgrad_add_",
    "grouped_wgrad_into",
    "grouped_wgrad_parts",
]
