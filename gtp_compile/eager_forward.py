"""Expert stacks whose forward runs in eager: one gather and one reduction a forward, weight gradients in fp32.

A Python loop over the experts that a batch hits can't be captured, and differs from rank to rank. What it reads must
not decide which collectives run:

    forward:   first read of any weight -> gather all of the module's   (none read: gathered behind the forward)
    output  -> tied to the gathered weights, so that a backward through it reaches each of them, used or not
    backward:  F.linear(x, w[e]) -> dy^T x in main_grad's dtype, added into the slice of one full-size buffer
               all uses done     -> the buffer is reduced

`GatheredWeight` knows which slice of the whole it is by its address, so any views lead there. Other operators than
those in `_PRODUCTS` leave their gradient to autograd, rounded to the compute dtype; `gtp::finalize` warns of that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gtp_compile._compat import DisableTorchFunctionSubclass, skip_frame
from gtp_compile.grouped_linear import GroupedLinear
from gtp_compile.kernels import dense_wgrad
from gtp_compile.parameters import ComputeLeaf
from gtp_compile.passes.anchors import emit_of, finalize
from gtp_compile.passes.collective_ops import emit_gather
from gtp_compile.weights import weight_grad_dtype

__all__ = ["EagerForward", "is_stack", "scoped_forward"]

log = logging.getLogger(__name__)


def is_stack(module: nn.Module, leaves: dict[str, ComputeLeaf]) -> bool:
    """Whether a module's weights may be read expert by expert: only then may what is read depend on the batch."""
    if isinstance(module, nn.modules.conv._ConvNd | GroupedLinear):
        return False
    return any(leaf.ndim > 2 and leaf.registered.shape[0] > 1 for leaf in leaves.values())


def scoped_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module with an expert stack: as it was in a compiled graph, in an `EagerForward` outside."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        outer = _enter(self)
        try:
            output = original(self, *args, **kwargs)
            return _tie(self, output, (args, kwargs))
        finally:
            _leave(self, outer)

    return skip_frame(run)


# What runs in eager below a compiled model is hidden from Dynamo, which would compile each frame that it meets.


@torch.compiler.disable
def _enter(module: Any) -> EagerForward | None:
    outer = module.__dict__.get("_gtp_eager")
    module.__dict__["_gtp_eager"] = EagerForward(module._gtp_leaves, type(module).__name__)
    return outer


@torch.compiler.disable
def _tie(module: Any, output: Any, inputs: Any) -> Any:
    return module.__dict__["_gtp_eager"].tie(output, inputs)


@torch.compiler.disable
def _leave(module: Any, outer: EagerForward | None) -> None:
    if outer is None:
        del module.__dict__["_gtp_eager"]
    else:
        module.__dict__["_gtp_eager"] = outer


class EagerForward:
    """One forward of a module outside compiled graphs: its weights, gathered at most once."""

    def __init__(self, leaves: dict[str, ComputeLeaf], module_name: str) -> None:
        self._leaves = leaves
        self._name = module_name
        self._compiled_uses = [leaf.compiled_uses for leaf in leaves.values()]
        self._is_training = torch.is_grad_enabled()
        self._full: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A whole weight; the first read gathers all of them, in the order of declaration, as on every rank."""
        if not self._full:
            self._gather()
        return self._full[name]

    def tie(self, output: Any, inputs: Any) -> Any:
        """`output`, such that a backward through it reaches every gathered weight, and every input.

        A rank without a token for the module has read none of its weights, and the others wait for it; and without
        its inputs the layers before it would wait.
        """
        if not self._full:
            if [leaf.compiled_uses for leaf in self._leaves.values()] != self._compiled_uses:
                return output  # a compiled graph holds their collectives
            self._gather()
        tied = [t for t in (*self._full.values(), *tree_leaves(inputs)) if isinstance(t, Tensor) and t.requires_grad]
        flat, spec = tree_flatten(output)
        first = next((i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None or not tied or not self._is_training:
            return output
        flat[first] = _Tie.apply(flat[first], *tied)
        return tree_unflatten(flat, spec)

    def _gather(self) -> None:
        _warn(self._name)
        # The first read may be one of a dtype, under no_grad.
        with torch.set_grad_enabled(self._is_training):
            for name, leaf in self._leaves.items():
                leaf.check_use()
                leaf.meet()
                gathered = Gathered(leaf, weight_grad_dtype(leaf, leaf.param_dtype))
                full: Any = _Gather.apply(gathered, leaf).as_subclass(GatheredWeight)
                full.gathered = gathered
                self._full[name] = full


@functools.cache
def _warn(module_name: str) -> None:
    log.warning(
        "%s: runs outside compiled graphs (a Python loop over the experts that a batch hits?), so every forward "
        "gathers its whole weights, and they stay until its backward. Gradients are right; faster is a form that can "
        'be captured, for Hugging Face models experts_implementation="grouped_mm".',
        module_name,
    )


class Gathered:
    """A weight while one eager forward and its backward use it: where its gradients add up.

    Attributes:
        leaf: the shard.
        dtype: the rule's dtype.
        address: of the whole weight's first byte.
    """

    def __init__(self, leaf: ComputeLeaf, dtype: torch.dtype) -> None:
        self.leaf = leaf
        self.dtype = dtype
        self.address = 0
        self._total: Tensor | None = None

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
        if grad is not None and total is not None:
            # Says so where it comes rounded.
            return total.add_(grad if grad.dtype == self.dtype else torch.ops.gtp.widen(grad, self.leaf, self.dtype))
        if grad is not None:
            return grad
        return self._zeros() if total is None else total

    def _zeros(self) -> Tensor:
        return torch.zeros(self.leaf.registered.shape, dtype=self.dtype, device=self.leaf.device)


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
        result = result.as_subclass(GatheredWeight)
        result.gathered = source.gathered
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
        if ctx.gathered.leaf.requires_grad:
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
    """The whole weight of a shard; its backward reduces what the uses left in `Gathered`, and what autograd brings."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, leaf: ComputeLeaf) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gathered = gathered
        full = emit_gather(emit_of([leaf]), (leaf,), leaf.mesh_layout, leaf.param_dtype)
        # Memory of its own, contiguous: slices are known by their addresses.
        if full.data_ptr() == leaf.data_ptr() or not full.is_contiguous():
            full = full.clone(memory_format=torch.contiguous_format)
        gathered.address = full.data_ptr()
        return full

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor]:
        gathered, leaf = ctx.gathered, ctx.gathered.leaf
        total = gathered.take(grad)
        (reduced,) = finalize(total, [leaf], [leaf.main_grad], leaf.mesh_layout, gathered.dtype)
        return None, reduced


class _Tie(torch.autograd.Function):
    """A copy of `output`, behind whose backward comes that of each tied tensor, with nothing from here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tied: Tensor) -> Tensor:
        # None ends at a weight; what a compiled graph returned wants a gradient.
        ctx.save_for_backward(output.new_empty(0))  # where all is checkpointed: have it repeated, whatever is in it
        ctx.zeros = [None if isinstance(t, GatheredWeight) else (t.shape, t.dtype, t.device) for t in tied]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        zeros = [z and torch.zeros(z[0], dtype=z[1], device=z[2]) for z in ctx.zeros]
        return grad, *zeros
