"""Schema, validation, autograd and registrations of `gtp::grouped_linear`."""

from typing import Any

import torch
from torch import Tensor

from gtp_compile.kernels.checks import OP_TAGS, check_offs, check_operands, check_same_size
from gtp_compile.kernels.grouped_linear.choice import choose_grouped_linear
from gtp_compile.kernels.grouped_linear.reference import grouped_linear_reference

_OP = "gtp::grouped_linear"


def _check(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    check_operands(_OP, x=(x, "[R, K]"), weight=(weight, "[E, N, K]"))
    check_offs(_OP, offs, "x", x)
    check_same_size(_OP, "E, the number of experts", offs=offs.shape[0], weight=weight.shape[0])
    check_same_size(_OP, "K, the in features", x=x.shape[1], weight=weight.shape[2])


def _cpu(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    _check(x, weight, offs)
    return grouped_linear_reference(x, weight, offs)


def _cuda(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    y = _fake(x, weight, offs)
    if y.numel():
        choose_grouped_linear(x, weight, y)(x, weight, offs, y)
    return y


def _fake(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    _check(x, weight, offs)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, offs = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # A frozen weight does not keep the activations alive, and frozen activations not the weight.
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offs = ctx.saved_tensors
    dx = None if weight is None else torch.ops.gtp.grouped_linear(dy, weight.transpose(1, 2), offs)
    dweight = None if x is None else torch.ops.gtp.grouped_wgrad(dy, x, offs, x.dtype)
    return dx, dweight, None


torch.library.define(_OP, "(Tensor x, Tensor weight, Tensor offs) -> Tensor", tags=OP_TAGS)
torch.library.impl(_OP, "cpu", _cpu)
torch.library.impl(_OP, "cuda", _cuda)
torch.library.register_fake(_OP, _fake)
torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
