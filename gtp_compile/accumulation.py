"""How gradients reach a weight: main_grad and `.grad` kept in step, and what arrives outside compiled graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from gtp_compile.parameters import ComputeLeaf, ShardedParameter

__all__ = ["alias", "collect", "deliver", "fold", "grad_part", "like", "local_of", "prepare_accumulation"]


def prepare_accumulation(leaf: ComputeLeaf) -> None:
    """Bring `.grad` and `main_grad` of a weight in step, before something is added to main_grad.

    Where the dtypes allow, `.grad` is a DTensor over main_grad's memory. So `zero_grad(set_to_none=True)`, which drops
    `.grad`, means "start from zero"; a `.grad` that the user put in its place counts; and so does a main_grad that was
    replaced since.
    """
    main_grad, param = leaf.main_grad, leaf.registered
    if main_grad is None:
        return
    if main_grad.dtype != param.dtype:
        if leaf._aliased is not None:  # an optimizer would go on reading the one before
            param.grad, leaf._aliased = None, None
        fold(param)
        return
    if leaf._aliased is not main_grad:
        known = [t.data_ptr() for t in (leaf._aliased, main_grad) if t is not None]
        if param.grad is not None and local_of(param.grad).data_ptr() not in known:
            main_grad.add_(grad_part(param))  # it came to the parameter itself, past the graphs
        alias(leaf, main_grad)
    elif param.grad is None:
        main_grad.zero_()
        alias(leaf, main_grad)
    elif local_of(param.grad).data_ptr() != main_grad.data_ptr():
        main_grad.copy_(grad_part(param))
        alias(leaf, main_grad)


def alias(leaf: ComputeLeaf, main_grad: Tensor) -> None:
    param = leaf.registered
    param.grad = like(param, main_grad)
    leaf._aliased = main_grad


def local_of(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, as the DTensor holds it (`to_local` would hand out another object)."""
    part = getattr(t, "_local_tensor", t)
    assert isinstance(part, Tensor)
    return part


def grad_part(param: Any) -> Tensor:
    """This rank's part of `.grad`, which DTensor's own operators may have placed otherwise than the parameter."""
    grad = param.grad
    if isinstance(grad, DTensor) and tuple(grad.placements) != tuple(param.placements):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad)


def like(param: ShardedParameter, local: Tensor) -> DTensor:
    """`local` as a DTensor placed as `param` is, over the same memory."""
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@torch.no_grad()
def fold(param: Any) -> None:
    """Post-accumulate hook of a registered parameter: a gradient that came to the parameter itself (a penalty on its
    values) belongs into main_grad, also where `.grad` can't lie over its memory.
    """
    main_grad = param.leaf.main_grad
    if main_grad is not None and main_grad.dtype != param.dtype and param.grad is not None:
        main_grad.add_(grad_part(param))
        param.grad = None


def collect(leaf: ComputeLeaf) -> None:
    """Post-accumulate hook of a leaf: take what arrived outside a compiled graph, then run the user's hooks.

    What arrives was reduced by `gtp::finalize`. After a compiled backward nothing arrives (`grad` is None).
    """
    if leaf.grad is not None:
        grad, leaf.grad = leaf.grad, None
        leaf.eager_uses += 1
        deliver(leaf, grad)
    param = leaf.registered
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)


@torch.no_grad()
def deliver(leaf: ComputeLeaf, reduced: Tensor) -> None:
    """Add a reduced gradient of the local shape to main_grad, or to `.grad` where there is no main_grad."""
    param = leaf.registered
    if leaf.main_grad is not None:
        prepare_accumulation(leaf)
        leaf.main_grad.add_(reduced)
    elif param.grad is None:
        param.grad = like(param, reduced.to(param.dtype))
    else:
        param.grad = like(param, grad_part(param).add_(reduced))
