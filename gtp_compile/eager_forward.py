"""Experts whose forward runs in eager: one gather and one reduction a forward, weight gradients in fp32.

A Python loop over the experts that a batch hits can't be captured, and differs from rank to rank. What it reads must
not decide which collectives run. Experts are the slices of a stacked weight, or modules in a list (`expert_lists`),
whose equal weights are gathered as one stack:

    forward:   first read of any expert -> gather all of the module's   (none read: gathered behind the forward)
    output  -> tied to the gathered weights, so that a backward through it reaches each of them, used or not
    backward:  F.linear(x, w[e]) -> dy^T x in main_grad's dtype, added into the slice of one full-size buffer
               all uses done     -> the buffer is reduced

Parts of such a forward may be compiled. A graph that has all experts of a list runs as it is where all ranks have one
(they vote); any other runs in eager, with the gathered weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gtp_compile._compat import current_backward, hidden_from_modes, skip_frame
from gtp_compile.expert_lists import leaves_below, read_in_part
from gtp_compile.gathered import Gathered, gather
from gtp_compile.grouped_linear import GroupedLinear
from gtp_compile.parameters import ComputeLeaf, materialize_leaves
from gtp_compile.passes.anchors import emit_of
from gtp_compile.weights import weight_grad_dtype

__all__ = ["EagerForward", "expect_all_ranks", "has_loop", "read_whole", "scoped_forward", "scopes_of"]

c10d = torch.ops._c10d_functional

log = logging.getLogger(__name__)


def has_loop(module: nn.Module, leaves: dict[str, ComputeLeaf]) -> bool:
    """Whether a module's `forward` may loop over experts: over those of a stack of its own, or of a list."""
    return "_gtp_expert_lists" in module.__dict__ or _is_stack(module, leaves)


def _is_stack(module: nn.Module, leaves: dict[str, ComputeLeaf]) -> bool:
    """Whether a module's weights may be read expert by expert: only then may what is read depend on the batch."""
    if isinstance(module, nn.modules.conv._ConvNd | GroupedLinear):
        return False
    return any(leaf.ndim > 2 and leaf.registered.shape[0] > 1 for leaf in leaves.values())


def scoped_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module that may loop: as it was in a compiled graph, in an `EagerForward` outside."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        scope = _enter(self)
        try:
            output = original(self, *args, **kwargs)
            return _tie(scope, output, (args, kwargs))
        finally:
            _leave(scope)

    return skip_frame(run)


# What runs in eager below a compiled model is hidden from Dynamo, which would compile each frame that it meets.


@torch.compiler.disable
def _enter(module: Any) -> EagerForward | None:
    scope = EagerForward.of(module)
    if scope is not None:
        scope.enter()
    return scope


@torch.compiler.disable
def _tie(scope: EagerForward | None, output: Any, inputs: Any) -> Any:
    return output if scope is None else scope.tie(output, inputs)


@torch.compiler.disable
def _leave(scope: EagerForward | None) -> None:
    if scope is not None:
        scope.leave()


def read_whole(leaf: ComputeLeaf) -> Tensor:
    """A weight outside compiled graphs, in a forward of its model: of the `EagerForward` that has it, or gathered.

    Raises:
        RuntimeError: an expert that other ranks don't read now, or can't be read again for this backward.
    """
    leaf.check_use()
    if leaf.scope is not None:
        return leaf.scope.read(leaf)
    if leaf.kept and current_backward() >= 0:
        return _read_again(leaf)
    leaf.meet()
    expect_all_ranks([leaf])
    return materialize_leaves((leaf,))


def _read_again(leaf: ComputeLeaf) -> Tensor:
    """The weight of an expert that is checkpointed by itself: other ranks may repeat others, so nothing is gathered."""

    def refuse(grad: Any = None) -> NoReturn:
        raise RuntimeError(
            f"{leaf.fqn}: its expert's forward is repeated in a backward that can't take the gradient any more; "
            "checkpoint the module with the loop over the experts, or each expert with use_reentrant=False"
        )

    gathered = next((g for g in leaf.kept if g.whole is not None), None)
    if gathered is None:
        refuse()
    with hidden_from_modes():  # selective checkpointing looks for what it did in forward
        weight = gathered.as_weight(gathered.part(gathered.whole, leaf).requires_grad_(leaf.requires_grad))
        if leaf.requires_grad:
            weight.register_hook(refuse)  # it is no part of the graph that was made in forward
    return weight


def expect_all_ranks(leaves: Iterable[ComputeLeaf]) -> None:
    """Where only some experts of a list are read, and no loop was recognised: see that all ranks read the same.

    Raises:
        RuntimeError: some rank did not come for these; the message has ranks and weights.
    """
    for experts, names in read_in_part(leaves).items():
        leaf = next(leaf for leaf in leaves if leaf.experts == experts)
        if leaf.meeting is not None and leaf.emit is None:  # `explain` may run on one rank
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            leaf.meeting.wait(
                shown, f"reading {len(names)} of the {experts.count} weights of the experts in {experts.fqn}"
            )


def scopes_of(leaves: Iterable[ComputeLeaf]) -> list[EagerForward]:
    """The forwards in eager that have these weights, each once; in the weights' order, which is that of all ranks."""
    return list(dict.fromkeys(leaf.scope for leaf in leaves if leaf.scope is not None))


class EagerForward:
    """One forward of a module outside compiled graphs: its experts, gathered at most once.

    Args:
        experts: leaves that are read if the batch hits them.
        others: leaves below the module that are read whatever the batch is; but what they give need not reach the
            output (a router, where no token came).
        has_lists: whether some experts are modules of a list, which a compiled graph may have in part.
    """

    def __init__(
        self, experts: Sequence[ComputeLeaf], others: Sequence[ComputeLeaf], has_lists: bool, module_name: str
    ) -> None:
        self._experts = dict.fromkeys(experts)
        self._has_lists = has_lists
        self._name = module_name
        self._outer = [(leaf, leaf.scope) for leaf in (*experts, *others)]
        self._compiled_uses = [leaf.compiled_uses for leaf in experts]
        self._is_training = torch.is_grad_enabled()
        self._is_captured: bool | None = None
        self._wholes: list[Tensor] = []
        self._gathered: dict[ComputeLeaf, tuple[Gathered, Tensor]] = {}
        self._reached: list[Tensor] = []
        self._computed: list[Tensor] = []

    @classmethod
    def of(cls, module: Any) -> EagerForward | None:
        """That of a module whose forward begins; None where another's has its experts already."""
        own = list(module._gtp_leaves.values()) if _is_stack(module, module._gtp_leaves) else []
        lists = module.__dict__.get("_gtp_expert_lists", ())
        listed = [leaf for path in lists for leaf in leaves_below(module.get_submodule(path))]
        experts = list(dict.fromkeys((*own, *listed)))
        if any(leaf.scope is not None and leaf in leaf.scope._experts for leaf in experts):
            return None
        others = [leaf for leaf in leaves_below(module) if leaf not in set(experts)] if lists else []
        return cls(experts, others, bool(lists), type(module).__name__)

    def enter(self) -> None:
        for leaf, _ in self._outer:
            leaf.scope = self

    def leave(self) -> None:
        for leaf, outer in self._outer:
            leaf.scope = outer

    def read(self, leaf: ComputeLeaf) -> Tensor:
        """A whole weight; the first read gathers all experts, in the order of declaration, as on every rank."""
        self._gather_unless_captured()
        if leaf in self._gathered:
            gathered, whole = self._gathered[leaf]
            return gathered.part(whole, leaf)
        leaf.meet()
        full = materialize_leaves((leaf,))
        if self._is_training:
            self._reached.append(full)
        return full

    def settle(self) -> None:
        """Before any weight below the module is read in a way that has not all of a list's experts: gather those.

        A shared expert behind the loop would else be gathered first on a rank whose batch hit none.
        """
        if self._has_lists:
            self._gather_unless_captured()

    def _gather_unless_captured(self) -> None:
        if not self.runs_captured(False) and not self._gathered:
            self._gather()

    def runs_captured(self, has_all: bool) -> bool:
        """Whether compiled graphs have the experts' collectives: where the first graph that reads them has all, and so
        it is on every rank (collective, once a forward).
        """
        if self._is_captured is None:
            self._is_captured = self._has_lists and self._all_agree(has_all)
        return self._is_captured

    def _all_agree(self, mine: bool) -> bool:
        leaf = next(iter(self._experts))
        leaf.meet()
        emit, layout = emit_of([leaf]), leaf.mesh_layout
        vote = torch.tensor([mine], dtype=torch.int32, device=leaf.device)
        for name, size in zip(layout.group_names, layout.group_sizes, strict=True):
            if size > 1:
                vote = emit(c10d.wait_tensor.default, emit(c10d.all_reduce.default, vote, "min", name))
        return bool(vote.item())

    def computed(self, outputs: Iterable[Any]) -> None:
        """Take note of what a compiled graph in this forward returned: its backward reduces the weights in it."""
        self._computed += [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]

    def tie(self, output: Any, inputs: Any) -> Any:
        """`output`, such that a backward through it reaches every gathered weight, and every input.

        A rank without a token for the module has read none of its weights, and the others wait for it; and without
        its inputs the layers before it would wait.
        """
        if not self._gathered:
            if self._has_captured_all():
                return output
            self._gather()
        wholes = [t for t in (*self._wholes, *self._reached) if t.requires_grad]
        inputs = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
        if not (wholes or inputs or self._computed) or not self._is_training:
            return output
        flat, spec = tree_flatten(output)
        tied = [
            # Each of them: a loss may begin at any.
            _Tie.apply(t, len(wholes), *wholes, *inputs, *self._computed)
            if isinstance(t, Tensor) and t.is_floating_point()
            else t
            for t in flat
        ]
        return tree_unflatten(tied, spec)

    def _has_captured_all(self) -> bool:
        if self._has_lists:
            return self.runs_captured(False)
        return [leaf.compiled_uses for leaf in self._experts] != self._compiled_uses

    def _gather(self) -> None:
        _warn(self._name)
        # The first read may be one of a dtype, under no_grad.
        with torch.set_grad_enabled(self._is_training):
            for leaves in _stackable(self._experts):
                for leaf in leaves:
                    leaf.check_use()
                    leaf.meet()
                gathered, whole = gather(leaves)
                self._wholes.append(whole)
                self._gathered |= dict.fromkeys(leaves, (gathered, whole))


def _stackable(leaves: Iterable[ComputeLeaf]) -> list[tuple[ComputeLeaf, ...]]:
    """The leaves in groups that one collective gathers and one reduces: weights of a list's experts that are alike."""
    groups: dict[Any, list[ComputeLeaf]] = {}
    for leaf in leaves:
        grad_dtype, has_main_grad = weight_grad_dtype(leaf, leaf.param_dtype), leaf.main_grad is not None
        facts = (
            leaf.registered.shape, leaf.mesh_layout, leaf.dtype, leaf.param_dtype, leaf.requires_grad, grad_dtype,
            has_main_grad,
        )  # fmt: skip
        groups.setdefault((leaf.experts, *facts) if leaf.experts is not None else leaf, []).append(leaf)
    return [tuple(group) for group in groups.values()]


@functools.cache
def _warn(module_name: str) -> None:
    log.warning(
        "%s: runs outside compiled graphs (a Python loop over the experts that a batch hits?), so every forward "
        "gathers the whole weights of all experts, and they stay until its backward. Gradients are right; faster is a "
        "form that can be captured: all experts' weights in one parameter, multiplied by F.grouped_mm, for Hugging "
        'Face models experts_implementation="grouped_mm".',
        module_name,
    )


class _Tie(torch.autograd.Function):
    """A copy of `output`, behind whose backward comes that of each tied tensor, with nothing from here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, wholes: int, *tied: Tensor) -> Tensor:
        # None ends at a weight, of which the first are; what a compiled graph returned wants a gradient.
        ctx.save_for_backward(output.new_empty(0))  # where all is checkpointed: have it repeated, whatever is in it
        ctx.zeros = [None] * wholes + [(t.shape, t.dtype, t.device) for t in tied[wholes:]]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        zeros = [z and torch.zeros(z[0], dtype=z[1], device=z[2]) for z in ctx.zeros]
        return grad, None, *zeros
