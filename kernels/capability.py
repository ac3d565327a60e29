"""What the GPU, the installed Triton and TMA can do: what kernels are chosen by."""

import torch
from torch import Tensor

__all__ = ["has_gluon", "has_rows_apart", "is_aligned", "is_hopper"]

# Versions on whose output the GPU tests have run. The kernel compiles with newer ones too, but Gluon is experimental:
# after `pytest -m gpu tests/kernels` with one of them, it may be added here.
_GLUON_TRITONS = ((3, 6),)

_TMA_ALIGNMENT = 16  # bytes


def has_gluon() -> bool:
    """Tell whether the installed Triton is one on which the Gluon kernels have been tested."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in _GLUON_TRITONS


def is_hopper(device: torch.device) -> bool:
    """Tell whether a device has Hopper's tensor cores."""
    # ROCm counts its capabilities in numbers of its own, 9.4 among them.
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def is_aligned(tensor: Tensor) -> bool:
    """Tell whether TMA can address a tensor: its start and all strides but the last are multiples of 16 bytes."""
    outer = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    return not any(offset % _TMA_ALIGNMENT for offset in (tensor.data_ptr(), *outer))


def has_rows_apart(matrix: Tensor) -> bool:
    """Tell whether no two rows overlap."""
    return matrix.stride(0) >= matrix.shape[1]
