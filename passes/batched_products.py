"""Batched GEMMs as the finders of `gemm_forms` look at them: at the operator, or from behind views and casts. Pure."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gtp_compile.kernels.checks import FLOAT_DTYPES
from gtp_compile.passes.view_dims import Dims, dims_behind, dims_of, is_rearrangement

__all__ = ["Product", "product_at", "product_behind"]

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True, slots=True)
class Product:
    """`a [B, M, C] @ b [B, C, K]`, seen from a node behind it.

    Attributes:
        dims: of that node.
        inside: the nodes from the operands to that node, which is the last one.
    """

    a: fx.Node
    b: fx.Node
    dims: Dims
    inside: list[fx.Node]


def product_at(node: Any) -> Product | None:
    """A batched GEMM; of single rows also `mul(dy [B, M, 1], x [B, 1, K])`, as Inductor writes it (in float32)."""
    casts: list[fx.Node] = []
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target is aten.bmm.default:
        a, b = node.args
    elif node.target is aten.mul.Tensor and (pair := _outer_pair(node)):
        a, b = pair
        if all(_is_widening(t) for t in pair) and len({t.args[0].meta["val"].dtype for t in pair}) == 1:  # type: ignore[union-attr]
            casts = [a, b]
            a, b = a.args[0], b.args[0]
    else:
        return None
    dtypes = {t.meta["val"].dtype for t in (a, b)}  # type: ignore[union-attr]
    if len(dtypes) > 1 or not dtypes.issubset(FLOAT_DTYPES):
        return None
    return Product(a, b, dims_of(node.meta["val"].shape), [*casts, node])  # type: ignore[arg-type]


def _outer_pair(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors of `[B, M, 1] * [B, 1, K]`, in this order."""
    for a, b in (node.args, node.args[::-1]):
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return None
        of_a, of_b = a.meta["val"].shape, b.meta["val"].shape
        if (
            len(of_a) == len(of_b) == 3
            and statically_known_true(of_a[0] == of_b[0])
            and statically_known_true(of_a[2] == 1)
            and statically_known_true(of_b[1] == 1)
            and not statically_known_true(of_a[1] == 1)
            and not statically_known_true(of_b[2] == 1)
        ):
            return a, b
    return None


def _is_widening(node: fx.Node) -> bool:
    """Whether a node is a cast that loses nothing."""
    if node.op != "call_function" or node.target not in _CASTS:
        return False
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return source in FLOAT_DTYPES and torch.promote_types(source, result) == result


def product_behind(node: Any) -> Product | None:
    """The batched GEMM behind views and casts, if the views keep batch and matrices apart."""
    path: list[fx.Node] = []
    while isinstance(node, fx.Node) and (is_rearrangement(node) or node.target in _CASTS):
        path.append(node)
        node = node.args[0]
    product = product_at(node)
    if product is None:
        return None
    dims = product.dims
    for view in reversed(path):
        if view.target not in _CASTS:
            behind = dims_behind(dims, view)
            if behind is None:
                return None
            dims = behind
    return Product(product.a, product.b, dims, [*product.inside, *reversed(path)])
