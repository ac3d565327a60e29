"""Experts that are modules of their own, in a ModuleList or ModuleDict: which lists are that, and who loops over them.

A list of layers, which all run, looks the same, and gathering all of its weights at once would need the memory of the
whole model. So a list is known by its name, or the user says which.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from gtp_compile.parameters import ComputeLeaf, ExpertList, ShardedParameter

__all__ = ["ExpertsFn", "is_expert_list", "leaves_below", "mark_expert_lists", "read_in_part"]

ExpertsFn = Callable[[str, nn.Module], bool]


def is_expert_list(fqn: str, module: nn.Module) -> bool:
    """The default `experts_fn`: the list's own name or class says "expert", or the class of all its members does.

    Members that hold such a list are layers with experts, no experts.
    """
    members = list(module.children())
    names = [fqn.rpartition(".")[2], type(module).__name__]
    by_name = any("expert" in name.lower() for name in names)
    # "MixtureOfExperts" is a layer.
    by_class = bool(members) and all(re.search("expert(?!s)", type(m).__name__.lower()) for m in members)
    return (by_name or by_class) and not any(_holds_experts(m) for m in members)


def _holds_experts(module: nn.Module) -> bool:
    return any(isinstance(m, nn.ModuleList | nn.ModuleDict) and is_expert_list(n, m) for n, m in module.named_modules())


@dataclass(frozen=True, slots=True)
class _Found:
    """A list of experts, the module whose `forward` loops over it, and the list's path below that ("" for itself)."""

    fqn: str
    experts: nn.Module
    owner: nn.Module
    path: str


def mark_expert_lists(model: nn.Module, experts_fn: ExpertsFn) -> None:
    """Tell the leaves of experts to which list they belong, and the modules that loop over a list, which it is.

    To be called when the parameters are placed, before classes are swapped.
    """
    for found in _expert_lists(model, experts_fn):
        leaves = list(leaves_below(found.experts))
        for leaf in leaves:
            leaf.experts = ExpertList(found.fqn, len(leaves))
        lists = found.owner.__dict__.get("_gtp_expert_lists", ())
        found.owner.__dict__["_gtp_expert_lists"] = (*lists, found.path)


def _expert_lists(model: nn.Module, experts_fn: ExpertsFn) -> Iterator[_Found]:
    modules = dict(model.named_modules())
    for fqn, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not experts_fn(fqn, module):
            continue
        if sum(next(leaves_below(child), None) is not None for child in module.children()) < 2:
            continue  # nothing to choose from
        path: list[str] = []
        parent, owner = fqn, module
        while type(owner).forward is nn.Module.forward and parent:
            parent, _, name = parent.rpartition(".")
            path, owner = [name, *path], modules[parent]
        yield _Found(fqn, module, owner, ".".join(path))


def leaves_below(module: nn.Module) -> Iterator[ComputeLeaf]:
    """The compute leaves of a module and all below it, each once, in module order."""
    return (p.leaf for p in module.parameters() if isinstance(p, ShardedParameter))


def read_in_part(leaves: Iterable[ComputeLeaf]) -> dict[ExpertList, list[str]]:
    """The lists of which `leaves` are some experts' weights and not all: their names."""
    found: dict[ExpertList, dict[int, str]] = collections.defaultdict(dict)
    for leaf in leaves:
        if leaf.experts is not None:
            found[leaf.experts][id(leaf)] = leaf.fqn
    return {experts: list(names.values()) for experts, names in found.items() if len(names) < experts.count}
