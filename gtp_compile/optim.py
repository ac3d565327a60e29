"""`MainGradOptimizer`: any torch optimizer for narrow (bf16, fp16) shards, fed from their float32 main_grads.

shard bf16  <-- rounded copy --  master fp32  <-- step --  main_grad fp32 (as the master's .grad, without a copy)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gtp_compile._compat import take_for_foreach
from gtp_compile.parameters import ShardedParameter, grad_part, is_narrow, like, local_of

__all__ = ["MainGradOptimizer", "watch_optimizers"]


class MainGradOptimizer(Optimizer):
    """Wrap a torch.optim class: it trains float32 masters of narrow parameters on their main_grads.

    A parameter whose main_grad has its own dtype, or that has none, is handed to the inner optimizer as it is.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        optim_class: e.g. `torch.optim.AdamW`.
        **kwargs: for `optim_class`.

    Attributes:
        inner: the wrapped optimizer, over the masters; its `param_groups` are this one's, so that schedulers work.
    """

    def __init__(self, params: Iterable[Any], optim_class: type[Optimizer] = torch.optim.AdamW, **kwargs: Any) -> None:
        self._pairs: list[tuple[ShardedParameter, Tensor]] = []
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.inner = optim_class([self._over_masters(g) for g in groups], **kwargs)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state

    def _over_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group, its narrow parameters replaced by their masters; `(name, parameter)` pairs may stand in
        it, as for any optimizer.
        """
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        masters = [(p[0], self._master(p[1])) if isinstance(p, tuple) else self._master(p) for p in params]
        return {**group, "params": masters}

    def _master(self, param: Tensor) -> Tensor:
        if not is_narrow(param):
            return param
        assert isinstance(param, ShardedParameter) and param.main_grad is not None
        local = torch.empty_like(param.main_grad).copy_(param.leaf.detach())
        master = torch.nn.Parameter(like(param, local), requires_grad=True)
        self._pairs.append((param, master))
        return master

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's, over the masters, each with its parameter's main_grad as `.grad`: what schedulers,
        gradient scalers and norms look at.
        """
        self.attach_grads()
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer."""
        self.inner.add_param_group(self._over_masters(param_group))

    def main_params(self) -> list[Tensor]:
        """What is trained, with gradients attached: masters, and parameters that need none."""
        return [p for group in self.param_groups for p in group["params"]]

    def attach_grads(self) -> None:
        """Let each master's `.grad` be its parameter's main_grad (the same memory); none where it is frozen."""
        for param, master in self._pairs:
            main_grad = param.main_grad
            if not param.requires_grad:
                master.grad = None
            elif main_grad is None:  # taken away since: gradients come as `.grad`
                master.grad = None if param.grad is None else like(param, grad_part(param).to(master.dtype))
            elif master.grad is None or local_of(master.grad).data_ptr() != main_grad.data_ptr():
                master.grad = like(param, main_grad)

    @torch.no_grad()
    def _take_new_values(self) -> None:
        """Where a shard is not its rounded master any more, somebody wrote to it: a checkpoint, an init."""
        for param, master in self._pairs:
            shard, local = param.leaf.detach(), local_of(master)
            local.copy_(torch.where(shard == local.to(shard.dtype), local, shard.to(local.dtype)))

    def clip_grad_norm_(self, max_norm: float, **kwargs: Any) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over what is trained."""
        return torch.nn.utils.clip_grad_norm_(self.main_params(), max_norm, **kwargs)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on the main_grads; then the shards become the masters, rounded."""
        self._take_new_values()
        self.attach_grads()
        loss = self.inner.step(closure)  # type: ignore[arg-type]
        with torch.no_grad():
            for param, master in self._pairs:
                param.leaf.data.copy_(local_of(master))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the main_grads in place (their memory is the backward's), and the others as torch does."""
        for param, _ in self._pairs:
            if param.main_grad is not None:
                param.main_grad.zero_()
        narrow = {id(master) for _, master in self._pairs}
        for p in self.main_params():
            if id(p) not in narrow and p.grad is not None:
                if set_to_none:
                    p.grad = None
                else:
                    p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the masters."""
        return {**self.inner.state_dict(), "masters": [master.detach() for _, master in self._pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        masters = state.pop("masters")
        if len(masters) != len(self._pairs):
            raise ValueError(f"{len(self._pairs)} masters expected, the state has {len(masters)}")
        self.inner.load_state_dict(state)
        self.state = self.inner.state
        with torch.no_grad():
            for (param, master), saved in zip(self._pairs, masters, strict=True):
                local_of(master).copy_(local_of(saved))
                param.leaf.data.copy_(local_of(master))


@functools.cache
def watch_optimizers() -> None:
    """From now on an optimizer that would skip a parameter in silence raises instead."""
    register_optimizer_step_pre_hook(_refuse)
    take_for_foreach(ShardedParameter)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    is_stock = type(optimizer).__module__.startswith("torch.optim")
    for param in params:
        replaced = getattr(param, "_gtp_replaced", None)
        if replaced is not None:
            raise RuntimeError(
                f"{replaced}: {name} holds the parameter that gtp_compile.shard replaced; make the optimizer behind "
                "shard, from model.parameters()"
            )
        if is_stock and is_narrow(param) and param.requires_grad and param.grad is None:
            main_grad = param.main_grad
            raise RuntimeError(
                f"{param.leaf.fqn}: is {param.dtype}, its gradient is in its {main_grad.dtype} main_grad, and "
                f"{name} would skip it. Wrap the optimizer: gtp_compile.MainGradOptimizer(model.parameters(), "
                f"torch.optim.{name}, ...); or keep the shards in float32: "
                "gtp_compile.shard(model.float(), mesh, param_dtype=torch.bfloat16)"
            )
