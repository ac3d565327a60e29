"""`unsharded`: a sharded model with plain, whole parameters for a while."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gtp_compile.parameters import ComputeLeaf
from gtp_compile.passes.collective_ops import emit_gather
from gtp_compile.passes.emit import RunEmit
from gtp_compile.sharded_module import leaves_in
from gtp_compile.watched import unwrap

__all__ = ["save_pretrained", "unsharded"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        RuntimeError: some rank did not enter; or, behind the block, a parameter was changed inside it: the change is
            lost.
    """
    with _unsharded(model, lambda leaf: dtype or leaf.param_dtype):
        yield model


def save_pretrained(model: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hugging Face's `save_pretrained` of a sharded model (collective): whole weights in the parameters' own dtype,
    written by the mesh's first rank unless `is_main_process` says otherwise. A `state_dict` of the caller's is taken
    as it is.
    """
    given = inspect.signature(save).bind_partial(*args, **kwargs).arguments
    if given.get("state_dict") is not None:
        return save(*args, **kwargs)
    if "is_main_process" not in given:
        meshes = [p.device_mesh for p in unwrap(model).parameters() if isinstance(p, DTensor)]
        kwargs["is_main_process"] = not meshes or dist.get_rank() == int(meshes[0].mesh.min())
    with _unsharded(model, lambda leaf: leaf.dtype):
        return save(*args, **kwargs)


@contextlib.contextmanager
def _unsharded(model: nn.Module, dtype_of: Callable[[ComputeLeaf], torch.dtype]) -> Iterator[None]:
    modules = [(m, type(m), leaves_in(m)) for m in unwrap(model).modules() if hasattr(type(m), "_gtp_original")]
    leaves = {id(leaf): leaf for _, _, found in modules for leaf in found.values()}
    first = next(iter(leaves.values()), None)
    if first is not None and first.meeting is not None:
        first.meeting.wait(first.fqn, "entering unsharded()")
    registered = {key: leaf.registered for key, leaf in leaves.items()}  # the modules let go of them for a while
    full = {key: _whole(leaf, dtype_of(leaf)) for key, leaf in leaves.items()}
    checksums = {key: _checksum(p) for key, p in full.items()}
    replaced: list[str] = []
    try:
        for module, cls, found in modules:
            module.__class__ = cls._gtp_original  # type: ignore[attr-defined]
            del module.__dict__["_gtp_leaves"]
            module._parameters.update({name: full[id(leaf)] for name, leaf in found.items()})
        yield
    finally:
        for module, cls, found in modules:
            replaced += [leaf.fqn for name, leaf in found.items() if module._parameters.get(name) is not full[id(leaf)]]
            module.__class__ = cls
            module.__dict__["_gtp_leaves"] = found
            module._parameters.update({name: registered[id(leaf)] for name, leaf in found.items()})  # type: ignore[misc]
    written = [leaf.fqn for key, leaf in leaves.items() if not torch.equal(_checksum(full[key]), checksums[key])]
    if names := list(dict.fromkeys(replaced + written)):
        raise RuntimeError(
            f"{', '.join(names[:3])}: changed inside unsharded(), which is lost; write into the sharded parameters "
            "(copy_ takes a whole tensor)"
        )


@torch.no_grad()
def _whole(leaf: ComputeLeaf, dtype: torch.dtype) -> nn.Parameter:
    whole = emit_gather(RunEmit(), (leaf,), leaf.mesh_layout, dtype)
    whole = whole.contiguous() if whole.data_ptr() != leaf.data_ptr() else whole.detach().clone()
    return nn.Parameter(whole, requires_grad=False)


@torch.no_grad()
def _checksum(param: Tensor) -> Tensor:
    """A number that changes with the values: a version counter would miss what is written through `.data`."""
    if param.is_meta or param.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    bits = param.detach().contiguous().view(_BITS[param.element_size()])
    bits = bits.reshape(bits.shape[0] if bits.ndim else 1, -1)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return sum((s * torch.arange(1, len(s) + 1, device=s.device)).sum() for s in sums)  # type: ignore[return-value]
