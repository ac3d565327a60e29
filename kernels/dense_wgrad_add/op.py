"""Schema, validation and registrations of `gtp::dense_wgrad_add_`. cuBLAS is the CUDA kernel."""

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_main_grad, check_operands, check_same_size
from gtp_compile.kernels.dense_wgrad_add.reference import dense_wgrad_add_reference

_OP = "gtp::dense_wgrad_add_"


def _check(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    batch = "E, " if dy.ndim == 3 else ""
    check_operands(_OP, dy=(dy, f"[{batch}R, N]"), x=(x, f"[{batch}R, K]"))
    check_main_grad(_OP, main_grad, f"[{batch}N, K]", "dy", dy)
    check_same_size(_OP, "R, the number of rows", dy=dy.shape[-2], x=x.shape[-2])
    if batch:
        check_same_size(_OP, "E, the number of experts", dy=dy.shape[0], x=x.shape[0])
        check_same_size(_OP, "E, the number of experts", main_grad=main_grad.shape[0], dy=dy.shape[0])
    check_same_size(_OP, "N, the out features", main_grad=main_grad.shape[-2], dy=dy.shape[-1])
    check_same_size(_OP, "K, the in features", main_grad=main_grad.shape[-1], x=x.shape[-1])


def _cpu(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    _check(main_grad, dy, x)
    dense_wgrad_add_reference(main_grad, dy, x)


def _cuda(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    _check(main_grad, dy, x)
    if 0 in (*dy.shape, x.shape[-1]):
        return  # the out_dtype overloads make no promise about empty operands
    add = torch.addmm if dy.ndim == 2 else torch.baddbmm
    if dy.dtype == torch.float32:
        add(main_grad, dy.mT, x, out=main_grad)
    else:
        add(main_grad, dy.mT, x, out_dtype=torch.float32, out=main_grad)


def _fake(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    _check(main_grad, dy, x)


torch.library.define(_OP, "(Tensor(a!) main_grad, Tensor dy, Tensor x) -> ()", tags=OP_TAGS)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
