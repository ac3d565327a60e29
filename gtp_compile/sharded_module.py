"""How a module with placed parameters hands them out, and what it does when it is moved, copied, saved or assigned to.

The class of such a module is swapped for a subclass with a getter per placed parameter; one subclass for all modules
alike, so that equal layers share compiled graphs. Names in `state_dict` and the parameters' own registration stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtp_compile._compat import skip_frame
from gtp_compile.eager_forward import has_loop, read_whole, scoped_forward
from gtp_compile.grouped_linear import GroupedLinear
from gtp_compile.parameters import (
    ComputeLeaf,
    ShardedParameter,
    attach_main_grad,
    check_conversion,
    is_narrow,
    materialize_leaves,
    renewed,
)
from gtp_compile.running import running_forwards

__all__ = ["Tree", "leaves_in", "take_over"]


class Tree:
    """Marks the modules of one sharded model: a `forward` of one of them makes the read of a weight a use."""

    def is_running(self) -> bool:
        """Whether some caller is the `forward` of one of the model's modules."""
        return next(running_forwards(self), None) is not None


def leaves_in(module: nn.Module) -> dict[str, ComputeLeaf]:
    """The compute leaves of a module's own placed parameters, by attribute name."""
    params = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: p.leaf for name, p in params if isinstance(p, ShardedParameter)}


def take_over(module: nn.Module, tree: Tree, is_root: bool) -> None:
    """Make `module` a part of a sharded model: its placed parameters are handed out through getters."""
    module.__dict__["_gtp_tree"] = tree
    leaves = leaves_in(module)
    may_loop = has_loop(module, leaves)
    if leaves or is_root or may_loop or hasattr(type(module), "save_pretrained"):
        module.__class__ = _sharded_class(type(module), tuple(leaves), may_loop)  # type: ignore[arg-type]
        _refresh(module)


def _refresh(module: nn.Module) -> None:
    """Find a module's leaves and weight groups, after its parameters were placed or renewed."""
    leaves = module.__dict__["_gtp_leaves"] = leaves_in(module)
    for name, leaf in leaves.items():
        leaf.holders.add((weakref.ref(module), name))
    if isinstance(module, GroupedLinear):
        # Discrete weights that are all placed alike form one group; so do the biases.
        for names in module.discrete_groups():
            members = tuple(leaves[n] for n in names if n in leaves)
            if len(members) == len(names) and len({m.mesh_layout for m in members}) == 1:
                for member in members:
                    member.group = members
                    if any(m.requires_grad for m in members):
                        attach_main_grad(member)


@functools.cache
def _sharded_class(cls: type[nn.Module], names: tuple[str, ...], may_loop: bool) -> type[nn.Module]:
    body: dict[str, Any] = {name: property(_getter(name)) for name in names}
    body.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__)
    body.update(_gtp_original=cls, register_parameter=_register_parameter, zero_grad=_zero_grad)
    body.update(__new__=_new, __reduce_ex__=_reduce, __setstate__=_setstate, __delattr__=_delattr, _apply=_apply)
    body.update(_gtp_may_loop=may_loop)
    if may_loop:
        body.update(forward=scoped_forward(cls.forward))
    if hasattr(cls, "save_pretrained"):
        body.update(save_pretrained=_save_pretrained)
    return type(cls.__name__, (cls,), body)


def _new(cls: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """`type(module)(...)` makes a module that is not sharded."""
    return cls._gtp_original(*args, **kwargs)


def _getter(name: str) -> Callable[[nn.Module], Tensor]:
    def get(self: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return materialize_leaves((self._gtp_leaves[name],))
        if torch.compiler.is_compiling() and name in self._parameters:
            # Not traced, but run, by Dynamo itself: it looks at what it guards (`hasattr(self, "weight")`). A gather
            # would be a collective of those ranks alone that compile now.
            return self._parameters[name]
        return _read(self, name)

    return skip_frame(get)  # a graph of its own would hold nothing but the gather


@torch.compiler.disable
def _read(module: Any, name: str) -> Tensor:
    """The attribute outside compiled graphs: the whole weight in a forward of the model, else the parameter."""
    param = module._parameters.get(name)
    leaf = module._gtp_leaves[name]
    if param is None:
        raise AttributeError(f"{leaf.fqn}: was taken out of its module after gtp_compile.shard")
    if leaf.scope is None and not module._gtp_tree.is_running():
        return param
    return read_whole(leaf)


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle, or deepcopy: the original class by its name, and everything the module hands out."""
    state = self._gtp_original.__getstate__(self)
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if k != "_gtp_leaves"}  # found again from the parameters
    return _rebuilt, (self._gtp_original, tuple(self._gtp_leaves), self._gtp_may_loop), state


def _rebuilt(original: type[nn.Module], names: tuple[str, ...], may_loop: bool) -> nn.Module:
    return original.__new__(_sharded_class(original, names, may_loop))  # type: ignore[arg-type]


def _setstate(self: Any, state: dict[str, Any]) -> None:
    self._gtp_original.__setstate__(self, state)
    _refresh(self)


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `.to`, `.cuda`, `.half`, `to_empty` come down to: children, plain parameters and buffers, then ours."""
    for module in self.modules() if recurse else [self]:
        for leaf in leaves_in(module).values():
            check_conversion(leaf, fn)  # before anything is converted
    placed = {name: self._parameters[name] for name in self._gtp_leaves}
    try:
        self._parameters.update(dict.fromkeys(placed))
        self._gtp_original._apply(self, fn, recurse)
    finally:
        self._parameters.update(placed)
    for name, param in placed.items():
        self._parameters[name] = renewed(param, fn)
    _refresh(self)
    return self


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    self._gtp_original.zero_grad(self, set_to_none)
    for param in self.parameters():
        # Where `.grad` can't lie over main_grad, dropping it says nothing to the next step.
        if is_narrow(param):
            param.main_grad.zero_()  # type: ignore[attr-defined]


def _delattr(self: Any, name: str) -> None:
    if name in self._gtp_leaves:
        raise AttributeError(
            f"{self._gtp_leaves[name].fqn}: is a sharded parameter, and can't be taken out of its module, as "
            "parametrizations do (PEFT's target_parameters in every forward); change the module before "
            "gtp_compile.shard, or leave this weight plain: a shard_fn that returns None for it"
        )
    self._gtp_original.__delattr__(self, name)


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    from gtp_compile.unsharding import save_pretrained  # which knows the modules of this file

    return save_pretrained(self, functools.partial(self._gtp_original.save_pretrained, self), *args, **kwargs)


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    """Assignment to a placed weight (also by `load_state_dict(assign=True)`) writes the values into the shard."""
    leaf = self._gtp_leaves.get(name)
    if leaf is None or param is self._parameters.get(name):
        self._gtp_original.register_parameter(self, name, param)
        return
    if param is None or param.shape != leaf.registered.shape:
        got = None if param is None else tuple(param.shape)
        raise ValueError(
            f"{leaf.fqn}: is a sharded parameter of shape {tuple(leaf.registered.shape)}, and can't be replaced by "
            f"{got}; change the module before gtp_compile.shard"
        )
    if isinstance(param, ShardedParameter):
        raise ValueError(
            f"{leaf.fqn}: can't become {param.leaf.fqn}, another sharded parameter; tie weights before "
            "gtp_compile.shard, or copy_ the values"
        )
    if leaf.is_meta:
        self._parameters[name] = renewed(leaf.registered, lambda t: torch.empty_like(t, device=param.device))
        _refresh(self)
    with torch.no_grad():
        self._parameters[name].copy_(param)
