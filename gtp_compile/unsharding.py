"""`unsharded`: a sharded model with plain, whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from gtp_compile.parameters import ComputeLeaf
from gtp_compile.passes.collective_ops import emit_gather
from gtp_compile.passes.emit import RunEmit
from gtp_compile.sharded_module import leaves_in
from gtp_compile.watched import unwrap

__all__ = ["unsharded"]


@contextlib.contextmanager
def unsharded(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Inside the block `model` is an ordinary module with whole parameters, on every rank: for evaluation, generation
    of unequal lengths, export. Behind it everything is as before.

    Entering is collective (all ranks gather); inside nothing communicates, so ranks may do different things, or
    nothing. It needs memory for the whole model on each rank.

    Args:
        model: a sharded model, compiled or not.
        dtype: of the whole parameters; default: what each is computed in (`param_dtype` of `shard`). Pass
            torch.float32 to export the masters.

    Raises:
        RuntimeError: behind the block, if a parameter was changed inside it: the change is lost.
    """
    modules = [(m, type(m), placed) for m in unwrap(model).modules() if (placed := leaves_in(m))]
    leaves = {id(leaf): leaf for _, _, found in modules for leaf in found.values()}
    registered = {key: leaf.registered for key, leaf in leaves.items()}  # the modules let go of them for a while
    full = {key: _whole(leaf, dtype) for key, leaf in leaves.items()}
    versions = {key: p._version for key, p in full.items()}
    try:
        for module, cls, found in modules:
            module.__class__ = cls._gtp_original  # type: ignore[attr-defined]
            del module.__dict__["_gtp_leaves"]
            module._parameters.update({name: full[id(leaf)] for name, leaf in found.items()})
        yield model
    finally:
        for module, cls, found in modules:
            module.__class__ = cls
            module.__dict__["_gtp_leaves"] = found
            module._parameters.update({name: registered[id(leaf)] for name, leaf in found.items()})  # type: ignore[misc]
    names = [leaf.fqn for key, leaf in leaves.items() if full[key]._version != versions[key]]
    if names:
        raise RuntimeError(
            f"{', '.join(names[:3])}: changed inside unsharded(), which is lost; write into the sharded parameters "
            "(copy_ takes a whole tensor)"
        )


@torch.no_grad()
def _whole(leaf: ComputeLeaf, dtype: torch.dtype | None) -> nn.Parameter:
    whole = emit_gather(RunEmit(), (leaf,), leaf.mesh_layout, dtype or leaf.param_dtype)
    whole = whole.contiguous() if whole.data_ptr() != leaf.data_ptr() else whole.detach().clone()
    return nn.Parameter(whole, requires_grad=False)
