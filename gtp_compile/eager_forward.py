"""Experts whose forward runs in eager: one gather and one reduction a forward, weight gradients in fp32.

A Python loop over the experts that a batch hits can't be captured, and differs from rank to rank. What it reads must
not decide which collectives run. Experts are the slices of a stacked weight, or modules in a list (`expert_lists`),
whose equal weights are gathered as one stack:

    forward:   first read of any expert -> gather all of the module's   (none read: gathered behind the forward)
    output  -> tied to the gathered weights, so that a backward through it reaches each of them, used or not
    backward:  F.linear(x, w[e]) -> dy^T x in main_grad's dtype, added into the slice of one full-size buffer
               all uses done     -> the buffer is reduced

`GatheredWeight` knows which slice of the whole it is by its address, so any views lead there. Other operators than
those in `_PRODUCTS` leave their gradient to autograd, rounded to the compute dtype; `gtp::finalize` warns of that.

Parts of such a forward may be compiled. A graph that has all experts of a list runs as it is where all ranks have one
(they vote); any other runs in eager, with the gathered weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gtp_compile._compat import DisableTorchFunctionSubclass, current_backward, hidden_from_modes, skip_frame
from gtp_compile.expert_lists import leaves_below, read_in_part
from gtp_compile.grouped_linear import GroupedLinear
from gtp_compile.kernels import dense_wgrad
from gtp_compile.parameters import ComputeLeaf, materialize_leaves
from gtp_compile.passes.anchors import emit_of, finalize
from gtp_compile.passes.collective_ops import emit_gather
from gtp_compile.weights import weight_grad_dtype

__all__ = ["EagerForward", "expect_all_ranks", "has_loop", "read_whole", "scoped_forward"]

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
        weight = _as_gathered(gathered.part(gathered.whole, leaf).requires_grad_(leaf.requires_grad), gathered)
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
        self._others = others
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
        self.settle()
        if leaf in self._experts and not self.runs_captured(False):
            if not self._gathered:
                self._gather()
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
        if self._has_lists and not self.runs_captured(False) and not self._gathered:
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
                gathered = Gathered(leaves, weight_grad_dtype(list(leaves), leaves[0].param_dtype))
                whole = _as_gathered(_Gather.apply(gathered, *leaves), gathered)
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


class Gathered:
    """Weights while one eager forward and its backward use them: where their gradients add up.

    Attributes:
        leaves: the shards; several are gathered as one stack `[members, *full]`.
        dtype: the rule's dtype.
        address: of the whole's first byte.
        whole: the weights until their gradient is reduced, for what a backward repeats; None of a lone leaf's.
    """

    def __init__(self, leaves: tuple[ComputeLeaf, ...], dtype: torch.dtype) -> None:
        self.leaves = leaves
        self.dtype = dtype
        self.address = 0
        self.whole: Tensor | None = None
        self._index = {leaf: i for i, leaf in enumerate(leaves)}
        self._total: Tensor | None = None

    def part(self, whole: Tensor, leaf: ComputeLeaf) -> Tensor:
        """A leaf's weight in the whole, as a view."""
        return whole if len(self.leaves) == 1 else whole[self._index[leaf]]

    def slice_of(self, weight: Tensor) -> tuple[list[int], tuple[int, ...], int]:
        """Size, stride and offset by which `weight` lies in the whole one."""
        offset = (weight.data_ptr() - self.address) // weight.element_size()
        return list(weight.shape), weight.stride(), offset

    def add(self, place: tuple[list[int], tuple[int, ...], int], wgrad: Tensor) -> None:
        if self._total is None:
            self._total = self._zeros()
        self._total.as_strided(*place).add_(wgrad)

    def take(self, grad: Tensor | None) -> Tensor:
        """Everything that has come, and what autograd brings; zeros where nothing was used."""
        total, self._total = self._total, None
        if grad is not None and self.leaves[0].ndim < 2:
            grad = grad.to(self.dtype)  # a sum, as of a norm or a bias, not a GEMM's: nothing to say
        if grad is not None and total is not None:
            # Says so where it comes rounded.
            return total.add_(
                grad if grad.dtype == self.dtype else torch.ops.gtp.widen(grad, self.leaves[0], self.dtype)
            )
        if grad is not None:
            return grad
        return self._zeros() if total is None else total

    def _zeros(self) -> Tensor:
        leader, members = self.leaves[0], len(self.leaves)
        shape = (*([members] if members > 1 else []), *leader.registered.shape)
        return torch.zeros(shape, dtype=self.dtype, device=leader.device)


class GatheredWeight(nn.Parameter):
    """A whole weight, or a view of one, whose products leave their weight gradient in `gathered`.

    An `nn.Parameter` by class only: compiled functions take no other subclass that a graph doesn't know.
    """

    gathered: Gathered

    @classmethod
    @skip_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a compiled function that gets a weight
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _apply(func, args, kwargs or {})


@torch.compiler.disable
def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_grad_enabled() and func in _PRODUCTS:
        result = _PRODUCTS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if func is _DATA:  # asked by torch for the tensor below a parameter
        return result
    source = next((a for a in args if isinstance(a, GatheredWeight)), None)
    return result if source is None else _followed(result, source)


def _followed(result: Any, source: GatheredWeight) -> Any:
    """`result`, in which views of a weight are `GatheredWeight` as it is."""
    if isinstance(result, list | tuple) and type(result) in (list, tuple):
        return type(result)(_followed(r, source) for r in result)
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        return _as_gathered(result, source.gathered)
    return result


def _as_gathered(weight: Tensor, gathered: Gathered) -> Tensor:
    result: Any = weight.as_subclass(GatheredWeight)
    result.gathered = gathered
    return result


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return _product(input, weight, bias, is_transposed=False)


def _matmul(input: Any, other: Any) -> Any:
    return _product(input, other, None, is_transposed=True)


def _product(x: Any, weight: Any, bias: Any, is_transposed: bool) -> Any:
    if not isinstance(weight, GatheredWeight) or isinstance(x, GatheredWeight) or weight.ndim != 2 or x.ndim < 1:
        return NotImplemented
    if not weight.requires_grad:
        return NotImplemented
    gathered_bias = bias.gathered if isinstance(bias, GatheredWeight) else None
    plain = [t.as_subclass(Tensor) if isinstance(t, GatheredWeight) else t for t in (x, weight, bias)]
    return _Product.apply(*plain, weight.gathered, gathered_bias, is_transposed)


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
}


class _Product(torch.autograd.Function):
    """`F.linear(x, weight, bias)`, or `x @ weight`: gradients of gathered operands go to `Gathered`.

    Autograd's graph still leads to them (with None), so that they are reduced when all their uses are done.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathered: Gathered,
        gathered_bias: Gathered | None,
        is_transposed: bool,
    ) -> Tensor:
        y = x @ weight if is_transposed else F.linear(x, weight, bias)
        ctx.place = gathered.slice_of(weight)
        ctx.bias_place = None if gathered_bias is None or bias is None else gathered_bias.slice_of(bias)
        ctx.gathered, ctx.gathered_bias, ctx.is_transposed, ctx.x_dtype = (
            gathered,
            gathered_bias,
            is_transposed,
            x.dtype,
        )
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))  # autocast computes in another dtype than it is given
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        out_in = (rows, dy_rows) if ctx.is_transposed else (dy_rows, rows)
        if ctx.gathered.leaves[0].requires_grad:
            ctx.gathered.add(ctx.place, dense_wgrad(*out_in, out_dtype=ctx.gathered.dtype))
        db = None
        if ctx.gathered_bias is not None:
            ctx.gathered_bias.add(ctx.bias_place, dy_rows.sum(0, dtype=ctx.gathered_bias.dtype))
        elif ctx.needs_input_grad[2]:
            db = dy_rows.sum(0).to(ctx.bias_dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ (weight.t() if ctx.is_transposed else weight)).to(ctx.x_dtype)
        return dx, None, db, None, None, None


class _Gather(torch.autograd.Function):
    """The whole weight(s) of shards; backward reduces what the uses left in `Gathered`, and what autograd brings."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, *leaves: ComputeLeaf) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gathered = gathered
        full = emit_gather(emit_of(list(leaves)), leaves, leaves[0].mesh_layout, leaves[0].param_dtype)
        # Memory of its own, contiguous: slices are known by their addresses.
        if full.data_ptr() == leaves[0].data_ptr() or not full.is_contiguous():
            full = full.clone(memory_format=torch.contiguous_format)
        gathered.address = full.data_ptr()
        if leaves[0].experts is not None:
            gathered.whole = full.detach()
            for leaf in leaves:
                leaf.kept.add(gathered)
        return full

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        gathered, leaves = ctx.gathered, list(ctx.gathered.leaves)
        gathered.whole = None
        main_grads = [leaf.main_grad for leaf in leaves]
        total = gathered.take(grad)
        return None, *finalize(total, leaves, main_grads, leaves[0].mesh_layout, gathered.dtype)


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
