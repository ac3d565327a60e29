"""Writing a sharded weight as if it were whole: `copy_` of a full tensor, and seeded random inits.

A stock DTensor draws each rank's part by itself, so on equally seeded ranks all parts get the same numbers. Here every
rank draws the whole weight and keeps its part: values, and the random state afterwards, are those of the unsharded
model. One weight at a time exists whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gtp_compile._compat import wrap_init

if TYPE_CHECKING:
    from gtp_compile.parameters import ComputeLeaf

__all__ = ["WholeValues"]


class WholeValues(DTensor):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain DTensor, as of `clone()`."""
        memo[id(self)] = new = self.detach().clone()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _filled(target: WholeValues, fill: Callable[[Tensor], Any]) -> WholeValues:
    full = torch.empty(target.shape, dtype=target.dtype, device=target.leaf.device)
    fill(full)
    return target.copy_(full)


def _sampler(name: str) -> Callable[..., WholeValues]:
    def sample(self: WholeValues, *args: Any, **kwargs: Any) -> WholeValues:
        return _filled(self, lambda full: getattr(full, name)(*args, **kwargs))

    sample.__name__ = name
    sample.__doc__ = f"`Tensor.{name}`, drawn for the whole weight on every rank: seeded alike, as if not sharded."
    return sample


for _name in ("uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"):
    setattr(WholeValues, _name, _sampler(_name))


def _on_the_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, WholeValues):
            return original(tensor, *args, **kwargs)
        with torch.no_grad():
            return _filled(tensor, lambda full: original(full, *args, **kwargs))

    return run


# Inits that go past a tensor's methods. trunc_normal_ draws again what it rejects, into tensors that are no parameters
# (the inner function is replaced: `trunc_normal_` itself may have been imported before); eye_ writes with `out=`, by
# which each rank's part becomes an identity; the others can't be run on any DTensor.
for _name in ("_no_grad_trunc_normal_", "eye_", "dirac_", "orthogonal_", "sparse_"):
    wrap_init(_name, _on_the_whole)
