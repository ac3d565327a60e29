"""Compile a model afresh under a session, and put back what running it changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gtp_compile._compat import fresh_compilation
from gtp_compile.backend import gtp
from gtp_compile.parameters import ShardedParameter, local_of
from gtp_compile.session import Session, watch
from gtp_compile.sharding import leaves_of

__all__ = ["loss_of", "preserved_state", "run_watched", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """The model behind `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


def run_watched(
    model: nn.Module, session: Session, options: dict[str, Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The model's output, from graphs compiled for this call alone (caches off)."""
    # A callable of our own: Dynamo compiles anew for a backend that it has not seen.
    backend = functools.partial(gtp, options=options or {})
    with watch(session), fresh_compilation(), torch.enable_grad():
        return torch.compile(unwrap(model), backend=backend)(*args, **kwargs)


def loss_of(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """The scalar to differentiate: `loss_fn(output)`, or what the output offers.

    Raises:
        ValueError: the output is no scalar and has no `loss`.
    """
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"a scalar loss is expected, the model gave {got}; pass loss_fn, which makes one of its output"
        )
    return loss


@contextlib.contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Put back, bitwise, whatever a training step on `model` changes but its weights' values (which it doesn't).

    main_grad, `.grad` (object and contents), buffers, the random number generators of CPU and CUDA.
    """
    model = unwrap(model)
    leaves = leaves_of(model)
    main_grads = [(leaf, leaf.main_grad, _copy(leaf.main_grad), leaf._aliased, leaf.eager_uses) for leaf in leaves]
    grads = [(p, p.grad, None if p.grad is None else _copy(local_of(p.grad))) for p in model.parameters()]
    params: list[Any] = list(model.parameters())
    plain = [(p, _copy(p.main_grad)) for p in params if _has_own_main_grad(p)]
    flags = [(p, p.grad_added_to_main_grad) for p in params if hasattr(p, "grad_added_to_main_grad")]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        with torch.no_grad():
            for param, grad, contents in grads:
                param.grad = grad
                if grad is not None and contents is not None:
                    local_of(grad).copy_(contents)
            for leaf, main_grad, contents, aliased, uses in main_grads:
                leaf.grad, leaf.main_grad, leaf._aliased, leaf.eager_uses = None, main_grad, aliased, uses
                if main_grad is not None:
                    main_grad.copy_(contents)
            for plain_param, contents in plain:
                plain_param.main_grad.copy_(contents)
            for flagged, flag in flags:
                flagged.grad_added_to_main_grad = flag
            for buffer, contents in buffers:
                buffer.copy_(contents)
        torch.set_rng_state(cpu_rng)
        if cuda_rng is not None:
            torch.cuda.set_rng_state_all(cuda_rng)


def _has_own_main_grad(param: Any) -> bool:
    """Whether a parameter that is not ours has one: a plain one (Megatron's convention), or another tool's."""
    return not isinstance(param, ShardedParameter) and isinstance(getattr(param, "main_grad", None), Tensor)


def _copy(t: Tensor | None) -> Any:
    return None if t is None else t.detach().clone()
