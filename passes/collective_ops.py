"""The collectives of one weight group, written once for graphs and for eager (see `emit`).

Layouts. A shard has the *local logical* shape: rank r holds rows r * c to (r + 1) * c of the sharded dim, cut at its
end, with c = ceil(size / W) (as torch.chunk and DTensor do it); so a last rank may hold fewer rows, or none. A
functional collective gathers and scatters equal parts along dim 0 only: each part is padded to c rows just before it
travels, the padding is cut just behind, and another dim is brought to the front in between.

    gather    [E, n, K] -> pad [E, c, K] -> all_gather [W*E, c, K] -> view [W, E, c, K] -> [E, W*c, K] -> cut [E, N, K]
    reduce    [E, N, K] -> pad [E, W*c, K] -> [W, E, c, K] -> reduce_scatter [E, c, K] -> cut [E, n, K]

Whoever computes a gradient may store it as [W, E, c, K] at once (see `emit_reduce`).

A group of several discrete weights is stacked along a new dim 0 first, so it costs one collective, not one a weight.
On a mesh with replica dims the reduced shard is all-reduced over each of them, in the mesh's order.
"""

import math
import operator
from collections.abc import Callable, Sequence
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
    "emit_pack",
    "emit_reduce",
    "emit_stack",
    "emit_unstack",
]

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

REPLICATED = -1  # the `dim` of a weight that every rank holds whole


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a weight group live. Plain data: it goes into the graph as constants of the anchor ops.

    Attributes:
        group_names: names of the process groups over which gradients are summed, as the functional collectives want
            them: the one that holds the shards first (where there is one), then the replicas', in mesh order.
        group_sizes: the number of ranks of each.
        dim: the sharded dim of each member, or `REPLICATED`.
        full_size: logical size of that dim (0 where replicated).
        reduce_op: "avg" or "sum", what becomes of the ranks' gradients.
    """

    group_names: tuple[str, ...]
    group_sizes: tuple[int, ...]
    dim: int
    full_size: int
    reduce_op: str

    @classmethod
    def of(cls, names: Sequence[str], sizes: Sequence[int], dim: int, full_size: int, reduce_op: str) -> "Layout":
        """From the constants of an anchor op, whose lists torch may hand back as lists."""
        return cls(tuple(names), tuple(sizes), dim, full_size, reduce_op)

    @property
    def sharded(self) -> bool:
        return self.dim != REPLICATED

    @property
    def shards(self) -> int:
        """Into how many parts a weight is cut."""
        return self.group_sizes[0] if self.sharded else 1

    @property
    def ranks(self) -> int:
        """How many ranks' gradients are summed."""
        return math.prod(self.group_sizes)

    @property
    def chunk(self) -> int:
        """Rows of the sharded dim that each rank sends and gets, padding included."""
        return -(-self.full_size // self.shards)

    @property
    def replica_groups(self) -> list[tuple[str, int]]:
        groups = list(zip(self.group_names, self.group_sizes, strict=True))
        return [(name, size) for name, size in (groups[1:] if self.sharded else groups) if size > 1]

    def rows(self, rank: int) -> tuple[int, int]:
        """First and end row of the sharded dim that a rank of the shard group holds."""
        return min(rank * self.chunk, self.full_size), min((rank + 1) * self.chunk, self.full_size)

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a full tensor that a rank of the shard group holds, as a view."""
        if not self.sharded:
            return full
        begin, end = self.rows(rank)
        return full.narrow(self.dim, begin, end - begin)


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
    """The members, of equal shapes, along a new dim 0.

    In operators that Inductor lowers (nothing is decomposed after the passes), and none for each member: a group may
    have hundreds.
    """
    if len(members) == 1:
        return members[0]
    shape = emit.value(members[0]).shape
    return emit(aten.view.default, emit(aten.cat.default, list(members), 0), [len(members), *shape])


def emit_unstack(emit: Emit, x: Any, members: Sequence[int]) -> list[Any]:
    """`x[i]` for each of `members`."""
    every = emit(aten.unbind.int, x, 0)
    return [emit(operator.getitem, every, i) for i in members]


def emit_gather(emit: Emit, shards: Sequence[Any], layout: Layout, param_dtype: torch.dtype) -> Any:
    """The full weight of a group in `param_dtype`: `[*full]`, or `[members, *full]` for several members.

    The cast comes before the gather: what travels has the compute dtype.
    """
    local = emit_cast(emit, emit_stack(emit, shards), param_dtype)
    size = layout.shards
    if size == 1:
        return local
    dim = layout.dim + (len(shards) > 1)
    local = _padded(emit, local, dim, layout.chunk)
    gathered = emit(c10d.all_gather_into_tensor.default, _contiguous(emit, local), size, layout.group_names[0])
    gathered = emit(c10d.wait_tensor.default, gathered)
    if dim > 0:
        shape = list(emit.value(local).shape)
        split = emit(aten.view.default, gathered, [size, *shape])
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        merged = _contiguous(emit, emit(aten.permute.default, split, order))
        gathered = emit(aten.view.default, merged, [*shape[:dim], size * shape[dim], *shape[dim + 1 :]])
    # Contiguous, as the anchor op promised: the graph's views, and kernels with rules for strides, count on it.
    return _contiguous(emit, _cut(emit, gathered, dim, layout.full_size))


def emit_pack(emit: Emit, grad: Any, dim: int, layout: Layout) -> Any:
    """`grad` with the ranks' parts of `dim`, padded to equal size, one behind the other along dim 0; contiguous."""
    size = layout.shards
    return _scatter_ready(emit, _padded(emit, grad, dim, size * layout.chunk), dim, size)


def emit_reduce(
    emit: Emit,
    grad: Any,
    shards: Sequence[Any],
    layout: Layout,
    grad_dtype: torch.dtype,
    pack: Callable[[Emit, Any, int, Layout], Any] = emit_pack,
) -> list[Any]:
    """The reduced gradients of a group's members, each of its shard's shape, in `grad_dtype`, the dtype of the sum.

    `grad` is `[*full]`, or `[members, *full]` for several members, in any dtype: it is cast before it travels. `pack`
    says how it comes into the order in which the ranks' parts travel.
    """
    grad = emit_cast(emit, grad, grad_dtype)
    size, op = layout.shards, layout.reduce_op
    if size > 1:
        dim = layout.dim + (len(shards) > 1)
        ready = pack(emit, grad, dim, layout)
        grad = emit(c10d.reduce_scatter_tensor.default, ready, op, size, layout.group_names[0])
        grad = emit(c10d.wait_tensor.default, grad)
        grad = _cut(emit, grad, dim, emit.value(shards[0]).shape[layout.dim])
    for name, _ in layout.replica_groups:
        grad = emit(c10d.all_reduce.default, _contiguous(emit, grad), op, name)
        grad = emit(c10d.wait_tensor.default, grad)
    return [grad] if len(shards) == 1 else emit_unstack(emit, grad, range(len(shards)))


def _padded(emit: Emit, x: Any, dim: int, size: int) -> Any:
    """`x` with zeros behind it along `dim`, up to `size`."""
    shape = emit.value(x).shape
    if shape[dim] == size:
        return x
    return emit(aten.constant_pad_nd.default, x, [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]])


def _cut(emit: Emit, x: Any, dim: int, size: int) -> Any:
    """The first `size` rows of `x` along `dim`."""
    return x if emit.value(x).shape[dim] == size else emit(aten.slice.Tensor, x, dim, 0, size)


def _scatter_ready(emit: Emit, grad: Any, dim: int, size: int) -> Any:
    """`grad` with the ranks' parts of `dim` one behind the other along dim 0, contiguous."""
    if dim == 0:
        return _contiguous(emit, grad)
    shape = list(emit.value(grad).shape)
    part = [*shape[:dim], shape[dim] // size, *shape[dim + 1 :]]
    split = emit(aten.view.default, _contiguous(emit, grad), [*shape[:dim], size, *part[dim:]])
    order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
    front = _contiguous(emit, emit(aten.permute.default, split, order))
    return emit(aten.view.default, front, [size * part[0], *part[1:]])
