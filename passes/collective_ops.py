"""The collectives of one weight group, written once for graphs and for eager (see `emit`).

Layouts. A shard has the *local* shape: `dim` of the weight divided by the group's size `W`. A functional collective
gathers and scatters along dim 0 only, so another dim is brought to the front around it:

    gather    [E, N/W, K] -> all_gather -> [W*E, N/W, K] -> view [W, E, N/W, K] -> [E, W, N/W, K] -> [E, N, K]
    reduce    [E, N, K] -> view [E, W, N/W, K] -> [W, E, N/W, K] -> reduce_scatter -> [E, N/W, K]

A group of several discrete weights is stacked along a new dim 0 first, so it costs one collective, not one a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gtp_compile.passes.emit import Emit

__all__ = [
    "REPLICATED",
    "DryEmit",
    "Layout",
    "dry_collectives",
    "emit_cast",
    "emit_gather",
    "emit_reduce",
    "emit_stack",
]

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

REPLICATED = -1  # the `dim` of a weight that every rank holds whole


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a weight group live. Plain data: it goes into the graph as constants of the anchor ops.

    Attributes:
        group_name: name of the process group, as the functional collectives want it.
        group_size: number of ranks `W`.
        dim: the sharded dim of each member, or `REPLICATED`.
        reduce_op: "avg" or "sum", what becomes of the ranks' gradients.
    """

    group_name: str
    group_size: int
    dim: int
    reduce_op: str

    @property
    def sharded(self) -> bool:
        return self.dim != REPLICATED


def dry_collectives() -> dict[Any, Any]:
    """For each collective, a local stand-in that gives what it would if every rank had this rank's data."""
    return {
        c10d.all_gather_into_tensor.default: lambda x, size, group: x.repeat(size, *[1] * (x.ndim - 1)),
        c10d.reduce_scatter_tensor.default: lambda x, op, size, group: x[: x.shape[0] // size].clone(),
        c10d.all_reduce.default: lambda x, op, group: x.clone(),
        c10d.wait_tensor.default: lambda x: x,
    }


class DryEmit:
    """Apply operators at once, but never communicate (`explain`)."""

    def __init__(self) -> None:
        self._stand_ins = dry_collectives()

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self._stand_ins.get(target, target)(*args, **kwargs)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x


def emit_cast(emit: Emit, x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`; nothing is emitted where it has it already."""
    return x if emit.value(x).dtype == dtype else emit(prims.convert_element_type.default, x, dtype)


def _contiguous(emit: Emit, x: Any) -> Any:
    # Functional reduce_scatter refuses strided inputs in eager torch 2.11.
    return x if emit.value(x).is_contiguous() else emit(aten.clone.default, x, memory_format=torch.contiguous_format)


def emit_stack(emit: Emit, members: Sequence[Any]) -> Any:
    """The members along a new dim 0. In operators that Inductor lowers: nothing is decomposed after the passes."""
    if len(members) == 1:
        return members[0]
    return emit(aten.cat.default, [emit(aten.unsqueeze.default, m, 0) for m in members], 0)


def emit_gather(emit: Emit, shards: Sequence[Any], layout: Layout, param_dtype: torch.dtype) -> Any:
    """The full weight of a group in `param_dtype`: `[*full]`, or `[members, *full]` for several members.

    The cast comes before the gather: what travels has the compute dtype.
    """
    local = emit_cast(emit, emit_stack(emit, shards), param_dtype)
    if not layout.sharded or layout.group_size == 1:
        return local
    dim = layout.dim + (len(shards) > 1)
    size = layout.group_size
    gathered = emit(c10d.all_gather_into_tensor.default, _contiguous(emit, local), layout.group_size, layout.group_name)
    gathered = emit(c10d.wait_tensor.default, gathered)
    if dim == 0:
        return gathered
    shape = list(emit.value(local).shape)
    split = emit(aten.view.default, gathered, [size, *shape])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    full = [*shape[:dim], size * shape[dim], *shape[dim + 1 :]]
    merged = emit(aten.clone.default, emit(aten.permute.default, split, order), memory_format=torch.contiguous_format)
    return emit(aten.view.default, merged, full)


def emit_reduce(emit: Emit, grad: Any, members: int, layout: Layout, grad_dtype: torch.dtype) -> list[Any]:
    """The reduced gradients of a group's members, local shape, in `grad_dtype`, the dtype of the sum.

    `grad` is `[*full]`, or `[members, *full]` for several members, in any dtype: it is cast before it travels.
    """
    grad = emit_cast(emit, grad, grad_dtype)
    size = layout.group_size
    if size > 1 and layout.sharded:
        dim = layout.dim + (members > 1)
        grad = emit(
            c10d.reduce_scatter_tensor.default,
            _scatter_ready(emit, grad, dim, size),
            layout.reduce_op,
            size,
            layout.group_name,
        )
        grad = emit(c10d.wait_tensor.default, grad)
    elif size > 1:
        grad = emit(c10d.all_reduce.default, _contiguous(emit, grad), layout.reduce_op, layout.group_name)
        grad = emit(c10d.wait_tensor.default, grad)
    return [grad] if members == 1 else [emit(aten.select.int, grad, 0, i) for i in range(members)]


def _scatter_ready(emit: Emit, grad: Any, dim: int, size: int) -> Any:
    """`grad` with the ranks' parts of `dim` one behind the other along dim 0, contiguous."""
    if dim == 0:
        return _contiguous(emit, grad)
    shape = list(emit.value(grad).shape)
    part = [*shape[:dim], shape[dim] // size, *shape[dim + 1 :]]
    split = emit(aten.view.default, _contiguous(emit, grad), [*shape[:dim], size, *part[dim:]])
    order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
    front = emit(aten.clone.default, emit(aten.permute.default, split, order), memory_format=torch.contiguous_format)
    return emit(aten.view.default, front, [size * part[0], *part[1:]])
