"""Follow the dims of a batched GEMM's result through views, to know batch from matrix behind them. Pure.

    bmm [B, M, K] -> view [G, E, M, K, 1] -> permute [G, E, K, M, 1] -> squeeze: dims B0, B1, K, M

A dim of size 1 is None: it can be anywhere, and it changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["Dim", "Dims", "dims_behind", "dims_of", "is_rearrangement"]

aten = torch.ops.aten

_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
# They keep the elements in row-major order, whatever shape they give them.
_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.clone.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Dim:
    """A dim of `[B, M, K]`, or a part of one.

    Attributes:
        axis: 0 for the batch, 1 and 2 for the rows and columns of a matrix.
        part: which part of it, () for all of it; sorted, the parts are as they were in one dim.
        size: how long, perhaps symbolic.
    """

    axis: int
    part: tuple[int, ...]
    size: Any

    @property
    def is_batch(self) -> bool:
        return self.axis == 0


Dims = Sequence[Dim | None]


def is_rearrangement(node: fx.Node) -> bool:
    """Whether a node only gives its input another shape or order of dims."""
    return node.op == "call_function" and node.target in (*_PERMUTES, *_RESHAPES)


def dims_of(shape: Sequence[Any]) -> Dims:
    """The dims of `[B, M, K]`."""
    return [None if _is_one(size) else Dim(axis, (), size) for axis, size in enumerate(shape)]


def dims_behind(dims: Dims, view: fx.Node) -> Dims | None:
    """The dims behind one rearrangement; None if dims are merged."""
    if view.target not in _PERMUTES:
        return _reshaped(dims, view.meta["val"].shape)
    ndim = len(dims)
    args: Any = view.args
    order = list(range(ndim))
    if view.target is aten.permute.default:
        order = [d % ndim for d in args[1]]
    elif ndim > 1:
        one, other = (0, 1) if view.target is aten.t.default else (d % ndim for d in args[1:])
        order[one], order[other] = order[other], order[one]
    return [dims[d] for d in order]


def _reshaped(dims: Dims, shape: Sequence[Any]) -> Dims | None:
    rest = [d for d in dims if d is not None]
    result: list[Dim | None] = []
    for size in shape:
        if _is_one(size):
            result.append(None)
            continue
        if not rest:
            return None
        dim = rest.pop(0)
        if statically_known_true(dim.size == size):
            result.append(dim)
            continue
        if not statically_known_true(size > 0):
            return None
        behind = dim.size // size
        if not statically_known_true(behind * size == dim.size):
            return None
        result.append(Dim(dim.axis, (*dim.part, 0), size))
        rest.insert(0, Dim(dim.axis, (*dim.part, 1), behind))
    return None if rest else result


def _is_one(size: Any) -> bool:
    return statically_known_true(size == 1)
