"""Whole weights in eager, whose products leave their weight gradients in float32, in one buffer that is reduced once.

`GatheredWeight` knows which slice of the whole it is by its address, so any views lead there. Other operators than
those in `_PRODUCTS` leave their gradient to autograd, rounded to the compute dtype; `gtp::finalize` warns of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_compile._compat import DisableTorchFunctionSubclass, skip_frame
from gtp_compile.kernels import dense_wgrad
from gtp_compile.parameters import ComputeLeaf
from gtp_compile.passes.anchors import emit_of, finalize
from gtp_compile.passes.collective_ops import emit_gather
from gtp_compile.weights import weight_grad_dtype

__all__ = ["Gathered", "gather"]


def gather(leaves: tuple[ComputeLeaf, ...]) -> tuple[Gathered, Tensor]:
    """Gather weights that are alike, as one stack (collective): where their gradients go, and the whole."""
    gathered = Gathered(leaves, weight_grad_dtype(list(leaves), leaves[0].param_dtype))
    return gathered, gathered.as_weight(_Gather.apply(gathered, *leaves))


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

    def as_weight(self, weight: Tensor) -> Tensor:
        """The whole, or a view of it, as one whose products leave their weight gradient here."""
        result: Any = weight.as_subclass(GatheredWeight)
        result.gathered = self
        return result

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
        return source.gathered.as_weight(result)
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
