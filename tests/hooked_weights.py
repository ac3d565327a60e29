"""Another tool's distributed weights, faked in one process; every hook leaves a trace of its own.

Materializing for the forward doubles the weights, for the backward it multiplies them by 4, and finalizing multiplies
the gradients by 8: a hook that is bypassed, or called twice, shows as an exact wrong factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gtp_compile

FORWARD, BACKWARD, FINALIZE = 2.0, 4.0, 8.0
BF16, FP32 = torch.bfloat16, torch.float32


class Hooked(nn.Parameter):
    """A leader (or follower) over whole weights. `handed` keeps what finalize got, by address and dtype."""

    is_distributed_weight = True

    def set_up(self, group: list[Tensor], returns: str = "dummies") -> None:
        self.group, self.returns = group, returns
        self.calls: list[str] = []
        self.dtypes: list[Any] = []
        self.addresses: list[int] = []
        self.buffer: Tensor | None = None

    def _scaled(self, factor: float) -> Any:
        full = [w.detach() * factor for w in self.group]
        return full if len(full) > 1 else full[0]

    def materialize_group_for_forward(self) -> Any:
        self.calls.append("forward")
        return self._scaled(FORWARD)

    def materialize_group_for_backward(self, **kwargs: Any) -> Any:
        self.calls.append("backward")
        return self._scaled(BACKWARD)

    def finalize_group_grads(self, wgrads: Any, **kwargs: Any) -> Any:
        self.calls.append("finalize")
        grads = list(wgrads) if isinstance(wgrads, list | tuple) else [wgrads]
        assert isinstance(wgrads, list | tuple) == (len(self.group) > 1)
        self.dtypes += [None if g is None else g.dtype for g in grads]
        self.addresses += [0 if g is None else g.data_ptr() for g in grads]
        if self.returns == "gradients":
            real = [None if g is None else g * FINALIZE for g in grads]
            return real if len(real) > 1 else real[0]
        for weight, grad in zip(self.group, grads, strict=True):
            if grad is not None and getattr(weight, "main_grad", None) is not None:
                weight.main_grad.add_(grad * FINALIZE)
                if self.returns != "none" and hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
        if self.returns == "none":
            return None
        dummies = [None if g is None else torch.full_like(g, 12345.0) for g in grads]
        return dummies if len(dummies) > 1 else dummies[0]

    def grad_buffer(self) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.full(self.shape, float("nan"), dtype=gtp_compile.weight_grad_dtype(self, self.dtype))
        return self.buffer


def hook(
    op: nn.Module,
    names: Sequence[str],
    *,
    leader_only: bool = False,
    main_grad: torch.dtype | None = FP32,
    returns: str = "dummies",
    cls: type[Hooked] = Hooked,
) -> Hooked:
    """Replace `op`'s parameters `names` by fakes (the first only, with `leader_only`), and return the leader."""
    group: list[Tensor] = []
    for i, name in enumerate(names):
        weight = getattr(op, name)
        if i == 0 or not leader_only:
            weight = cls(weight.data)
            setattr(op, name, weight)
        if main_grad is not None:
            weight.main_grad = torch.zeros_like(weight, dtype=main_grad, requires_grad=False)
        weight.grad_added_to_main_grad = False
        group.append(weight)
    for weight in group:
        if isinstance(weight, Hooked):
            weight.set_up(group, returns)
    assert isinstance(group[0], Hooked)
    return group[0]


def maybe_compiled(module: nn.Module, compiled: bool) -> Callable[..., Tensor]:
    """`module` as it is, or compiled whole by our backend with the eager inner compiler."""
    if not compiled:
        return module
    return torch.compile(module, backend="gtp", fullgraph=True, options={"inner": "eager"})
