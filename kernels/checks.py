"""Argument checks that the ops share. They run on real and on fake tensors and never add a guard."""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT_NAMES = ", ".join(str(dtype) for dtype in FLOAT_DTYPES)

# Inductor need not copy an operand to give it the strides it had in eager: the ops read any strides.
OP_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def check_operands(op: str, **operands: tuple[Tensor, str]) -> None:
    """Check rank, dtype and device of float operands, given as `name=(tensor, shape legend)`, first one leading."""
    (lead_name, (lead, _)), *_ = operands.items()
    for name, (tensor, legend) in operands.items():
        ndim = legend.count(",") + 1
        if tensor.ndim != ndim:
            raise ValueError(
                f"{op}: {name} must have {ndim} dimensions {legend}, got {tensor.ndim} (shape {tuple(tensor.shape)}); "
                f"flatten or unsqueeze it first"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{op}: {name} must be one of {_FLOAT_NAMES}, got {tensor.dtype}; cast it first")
        if tensor.dtype != lead.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of {lead_name}, {lead.dtype}, got {tensor.dtype}; cast one of them "
                f"(autocast does not reach this op)"
            )
        _check_device(op, name, tensor, lead_name, lead)


def check_offs(op: str, offs: Tensor, lead_name: str, lead: Tensor) -> None:
    """Check that `offs` is an int32 vector on the device of `lead`; its values stay unread."""
    if offs.ndim != 1:
        raise ValueError(
            f"{op}: offs must have 1 dimension [E], got {offs.ndim} (shape {tuple(offs.shape)}); "
            f"pass the cumulative row ends, one per expert"
        )
    if offs.dtype != torch.int32:
        raise TypeError(f"{op}: offs must be torch.int32, got {offs.dtype}; use offs.to(torch.int32)")
    _check_device(op, "offs", offs, lead_name, lead)


def check_main_grad(op: str, main_grad: Tensor, legend: str, lead_name: str, lead: Tensor) -> None:
    """Check that `main_grad` has the rank of `legend`, float32 and the device of `lead`."""
    ndim = legend.count(",") + 1
    if main_grad.ndim != ndim:
        raise ValueError(
            f"{op}: main_grad must have {ndim} dimensions {legend}, got {main_grad.ndim} (shape "
            f"{tuple(main_grad.shape)}); view it as {'one matrix per expert' if ndim == 3 else 'a matrix'}"
        )
    if main_grad.dtype != torch.float32:
        raise TypeError(
            f"{op}: main_grad must be torch.float32, got {main_grad.dtype}; a narrower sum would round at each step"
        )
    _check_device(op, "main_grad", main_grad, lead_name, lead)


def check_out_dtype(op: str, out_dtype: torch.dtype) -> None:
    """Check that the op can store `out_dtype`."""
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: out_dtype must be one of {_FLOAT_NAMES}, got {out_dtype}; cast the result instead")


def check_out(op: str, out: Tensor, shape: tuple[int, ...], lead: Tensor) -> None:
    """Check that `out` is memory for a result of `shape`, on the device of `lead`, in a dtype that is stored."""
    if tuple(out.shape) != shape:
        raise ValueError(f"{op}: an output must have the shape {shape}, got {tuple(out.shape)}; allocate the full one")
    check_out_dtype(op, out.dtype)
    _check_device(op, "an output", out, "dy", lead)


def check_same_size(op: str, what: str, **sizes: int | torch.SymInt) -> None:
    """Refuse two sizes, given as `tensor_name=size`, that provably differ.

    Symbolic sizes that may be equal pass here; the device implementation sees the numbers and checks again.
    """
    (first_name, first_size), (other_name, other_size) = sizes.items()
    if statically_known_true(first_size != other_size):
        raise ValueError(
            f"{op}: {first_name} and {other_name} must agree on {what}, got {first_size} and {other_size}; "
            f"slice or rebuild one of them"
        )


def _check_device(op: str, name: str, tensor: Tensor, lead_name: str, lead: Tensor) -> None:
    if tensor.device != lead.device:
        raise ValueError(
            f"{op}: {name} must be on the device of {lead_name}, {lead.device}, got {tensor.device}; "
            f"use {name}.to({lead_name}.device)"
        )
