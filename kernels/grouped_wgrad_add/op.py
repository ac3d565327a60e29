"""Schema, validation and registrations of `gtp::grouped_wgrad_add_`. Its CUDA kernels are those of the fresh form."""

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_main_grad, check_offs, check_operands, check_same_size
from gtp_compile.kernels.grouped_wgrad.choice import choose_grouped_wgrad
from gtp_compile.kernels.grouped_wgrad_add.reference import grouped_wgrad_add_reference

_OP = "gtp::grouped_wgrad_add_"


def _check(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    check_operands(_OP, dy=(dy, "[R, N]"), x=(x, "[R, K]"))
    check_offs(_OP, offs, "dy", dy)
    check_main_grad(_OP, main_grad, "[E, N, K]", "dy", dy)
    check_same_size(_OP, "R, the number of routed rows", dy=dy.shape[0], x=x.shape[0])
    check_same_size(_OP, "E, the number of experts", main_grad=main_grad.shape[0], offs=offs.shape[0])
    check_same_size(_OP, "N, the out features", main_grad=main_grad.shape[1], dy=dy.shape[1])
    check_same_size(_OP, "K, the in features", main_grad=main_grad.shape[2], x=x.shape[1])


def _cpu(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    _check(main_grad, dy, x, offs)
    grouped_wgrad_add_reference(main_grad, dy, x, offs)


def _cuda(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    _check(main_grad, dy, x, offs)
    if main_grad.numel():
        choose_grouped_wgrad(dy, x, main_grad)(dy, x, offs, main_grad, accumulate=True)


def _fake(main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    _check(main_grad, dy, x, offs)


torch.library.define(_OP, "(Tensor(a!) main_grad, Tensor dy, Tensor x, Tensor offs) -> ()", tags=OP_TAGS)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
