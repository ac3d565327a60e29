"""Schema, validation and registrations of `gtp::grouped_linear_parts`. Its CUDA kernels are the grouped linear's."""

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_offs, check_operands, check_same_size
from gtp_compile.kernels.grouped_linear.choice import choose_grouped_linear
from gtp_compile.kernels.grouped_linear_parts.reference import grouped_linear_parts_reference

_OP = "gtp::grouped_linear_parts"


def _check(x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, bias: Tensor | None) -> None:
    if dim not in (1, 2):
        raise ValueError(f"{_OP}: dim must be 1 (N) or 2 (K) of [E, N, K], got {dim}; a stack cut by experts is whole")
    check_operands(_OP, x=(x, "[R, K]"), weight=(weight, "[W, E, c, K]" if dim == 1 else "[W, E, N, c]"))
    check_offs(_OP, offs, "x", x)
    check_same_size(_OP, "E, the number of experts", offs=offs.shape[0], weight=weight.shape[1])
    check_same_size(_OP, "K, the in features", x=x.shape[1], weight=size if dim == 2 else weight.shape[3])
    parts, chunk = weight.shape[0], weight.shape[dim + 1]
    if parts < 1 or -(-size // parts) != chunk:
        raise ValueError(
            f"{_OP}: {parts} parts of {chunk} must be ceil(size / parts) each of size {size}; pass the gathered shards"
        )
    if bias is not None:
        check_operands(_OP, x=(x, "[R, K]"), bias=(bias, "[E, N]"))
        check_same_size(_OP, "E, the number of experts", offs=offs.shape[0], bias=bias.shape[0])
        check_same_size(_OP, "N, the out features", weight=_out_features(weight, dim, size), bias=bias.shape[1])


def _out_features(weight: Tensor, dim: int, size: int) -> int:
    return size if dim == 1 else weight.shape[2]


def _cpu(x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, bias: Tensor | None = None) -> Tensor:
    _check(x, weight, offs, dim, size, bias)
    return grouped_linear_parts_reference(x, weight, offs, dim, size, bias)


def _cuda(x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, bias: Tensor | None = None) -> Tensor:
    y = _fake(x, weight, offs, dim, size, bias)
    if y.numel():
        choose_grouped_linear(x, weight, y, dim)(x, weight, offs, y, bias, dim)
    return y


def _fake(x: Tensor, weight: Tensor, offs: Tensor, dim: int, size: int, bias: Tensor | None = None) -> Tensor:
    _check(x, weight, offs, dim, size, bias)
    return x.new_empty((x.shape[0], _out_features(weight, dim, size)))


torch.library.define(
    _OP, "(Tensor x, Tensor weight, Tensor offs, int dim, int size, Tensor? bias=None) -> Tensor", tags=OP_TAGS
)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
