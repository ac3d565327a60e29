"""Writing a sharded weight as if it were whole: `copy_` of a full tensor, seeded random inits, writes to its rows.

A stock DTensor draws each rank's part by itself, so on equally seeded ranks all parts get the same numbers. Here every
rank draws the whole weight and keeps its part: values, and the random state afterwards, are those of the unsharded
model. One weight at a time exists whole. Replicas get one rank's draw, however the ranks were seeded.

A view across the sharded dim (`weight[3]`) is a copy of gathered rows in a stock DTensor, and what is written to it is
lost. Here it is a `Rows`, whose in-place methods write the whole weight (collective, as the read was).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from gtp_compile._compat import is_fake, named_group, wrap_init

if TYPE_CHECKING:
    from gtp_compile.parameters import ComputeLeaf

__all__ = ["WholeValues"]


class _Values(DTensor):
    """Is copied and saved as a plain DTensor."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = self.detach().clone()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class WholeValues(_Values):
    """A DTensor over a leaf's memory that takes values as a whole tensor does."""

    __slots__ = ()

    leaf: ComputeLeaf

    def copy_(self, src: Tensor, non_blocking: bool = False) -> WholeValues:
        """Take the values of `src`: a DTensor, or a plain tensor that holds the whole weight."""
        if isinstance(src, DTensor):
            super().copy_(src, non_blocking)
        else:
            if src.shape != self.shape:
                raise ValueError(
                    f"{self.leaf.fqn}: values of shape {tuple(self.shape)} expected, got {tuple(src.shape)}"
                )
            self.leaf.data.copy_(self.leaf.mesh_layout.part(src, self.leaf.shard_rank), non_blocking)
        return self

    def fill_with(self, fill: Callable[[Tensor], Any], start: Tensor | None = None) -> WholeValues:
        """Take the values of a whole tensor that `fill` writes; it is given `start`, or memory as it comes."""
        full = torch.empty(self.shape, dtype=self.dtype, device=self.leaf.device) if start is None else start
        fill(full)
        self.copy_(full)
        for name, _ in self.leaf.mesh_layout.replica_groups:
            group = named_group(name)
            if not is_fake(group):
                dist.broadcast(self.leaf.data, group=group, group_src=0)
        return self


class View(_Values):
    """A view of a sharded weight, in the shard's memory.

    Attributes:
        weight: of which it is a view.
        path: makes the same view of a whole tensor.
    """

    __slots__ = ()

    weight: WholeValues
    path: Callable[[Tensor], Tensor]


class Rows(View):
    """A view across the sharded dim: a copy to read, whose in-place methods write into the weight."""

    __slots__ = ()


def _writer(name: str) -> Callable[..., Tensor]:
    @torch.no_grad()
    def write(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        values = [a.full_tensor() if isinstance(a, DTensor) else a for a in args]
        weight, view = (self.weight, self.path) if isinstance(self, View) else (self, lambda full: full)
        whole = weight.full_tensor().clone()
        weight.fill_with(lambda full: getattr(view(full), name)(*values, **kwargs), whole)
        if isinstance(self, Rows):
            self._local_tensor.copy_(view(whole))
        return self

    return write


def _viewer(name: str) -> Callable[..., Any]:
    def view(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(DTensor, name)(self, *args, **kwargs)
        weight = self.weight if isinstance(self, View) else self
        if not weight.leaf.mesh_layout.sharded:
            return result
        before = self.path if isinstance(self, View) else lambda full: full
        if isinstance(result, DTensor):
            return _as_view(result, weight, lambda full: getattr(before(full), name)(*args, **kwargs))
        paths = [lambda full, i=i: getattr(before(full), name)(*args, **kwargs)[i] for i in range(len(result))]
        return type(result)(_as_view(r, weight, path) for r, path in zip(result, paths, strict=True))

    return view


def _as_view(result: Any, weight: WholeValues, path: Callable[[Tensor], Tensor]) -> Any:
    # Told by the placements: ranks without rows could not tell by the memory.
    result.__class__ = View if any(isinstance(p, Shard) for p in result.placements) else Rows
    result.weight, result.path = weight, path
    return result


def _sampler(name: str) -> Callable[..., WholeValues]:
    def sample(self: WholeValues, *args: Any, **kwargs: Any) -> WholeValues:
        return self.fill_with(lambda full: getattr(full, name)(*args, **kwargs))

    sample.__name__ = name
    sample.__doc__ = f"`Tensor.{name}`, drawn for the whole weight on every rank: seeded alike, as if not sharded."
    return sample


_RANDOM = (
    "uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"
)  # fmt: skip
_VIEWS = (
    "__getitem__", "select", "narrow", "chunk", "split", "view", "reshape", "flatten", "diagonal", "t", "transpose",
    "permute",
)  # fmt: skip
_IN_PLACE = [
    n for n in dir(Tensor) if n.endswith("_") and not n.startswith("_") and n not in ("requires_grad_", "detach_")
]

for _name in _RANDOM:
    setattr(WholeValues, _name, _sampler(_name))
    setattr(View, _name, _writer(_name))
for _name in _IN_PLACE:
    setattr(Rows, _name, _writer(_name))
for _class in (WholeValues, View):
    for _name in _VIEWS:
        setattr(_class, _name, _viewer(_name))
    for _name in ("__setitem__",):
        setattr(_class, _name, _writer(_name))


def _on_the_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, WholeValues):
            return original(tensor, *args, **kwargs)
        with torch.no_grad():
            return tensor.fill_with(lambda full: original(full, *args, **kwargs))

    return run


# Inits that go past a tensor's methods. trunc_normal_ draws again what it rejects, into tensors that are no parameters
# (the inner function is replaced: `trunc_normal_` itself may have been imported before); eye_ writes with `out=`, by
# which each rank's part becomes an identity; the others can't be run on any DTensor.
for _name in ("_no_grad_trunc_normal_", "eye_", "dirac_", "orthogonal_", "sparse_"):
    wrap_init(_name, _on_the_whole)
