"""The forms in which models write the GEMM of a weight gradient. Each is one function, `node -> Gemm | None`. Pure.

    mm          mm(dy^T, x)                               dense                                     [N, K]
    grouped_mm  _grouped_mm(dy^T, x, offs)                experts with rows of their own            [E, N, K]
    bmm         bmm(dy^T, x)                              experts with equally many rows            [E, N, K]
    batch_sum   sum(bmm(dy^T, x), batch)                  a weight that is broadcast over a batch   [N, K]
    picked      index_put(0, ids, bmm(dy^T, x), add)      a weight picked for each row              [E, N, K]
    fallback    transformers::grouped_mm_fallback_backward   Hugging Face's loop over experts      [E, K, N]
    gtp         gtp::dense_wgrad, gtp::grouped_wgrad      our own

A finder says what the GEMM reads and how the same result is computed in another dtype, from those operands alone. It
finds only what it can compute: whatever else has a say (a scale for each row, a base that is not zero) makes it find
nothing, and the gradient is followed, or refused, node by node. `FORMS` at the end is the list.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

import gtp_compile.kernels  # noqa: F401  (registers the ops)
from gtp_compile.passes.base import NOTE
from gtp_compile.passes.batched_products import Product, product_at, product_behind
from gtp_compile.passes.emit import Emit, GraphEmit
from gtp_compile.passes.picked_rows import pick_rows, sort_by_expert, times_rows
from gtp_compile.passes.view_dims import Dim

__all__ = [
    "FORMS",
    "OWN_GEMMS",
    "Form",
    "Gemm",
    "GemmNote",
    "find_gemm",
    "form_of",
    "is_grouped_wgrad_mm",
    "is_outer_product",
    "transposed",
    "write_gemm",
]

aten = torch.ops.aten
gtp = torch.ops.gtp
prims = torch.ops.prims

OWN_GEMMS = (gtp.dense_wgrad.default, gtp.grouped_wgrad.default)


@dataclass(slots=True)
class Gemm:
    """The GEMM of a weight gradient, found in a graph.

    Attributes:
        node: its result.
        operands: what it reads.
        write: `(emit, dtype)` -> the same result, of the same shape, computed from the operands in `dtype`.
        inside: the nodes between the operands and `node`, inputs before users.
        form: the form in which it was found.
    """

    node: fx.Node
    operands: list[fx.Node]
    write: Callable[[Emit, torch.dtype], Any]
    inside: list[fx.Node] = field(default_factory=list)
    form: "Form" = field(init=False)


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        name: for `explain`.
        find: the finder.
        targets: the operators whose result may be such a GEMM's.
        is_fused: whether `fuse_wgrads` writes our op for it even where the dtype stays, because it does less.
    """

    name: str
    find: Callable[[fx.Node], Gemm | None]
    targets: tuple[Any, ...]
    is_fused: bool = False


@dataclass(frozen=True, slots=True)
class GemmNote:
    """On a GEMM of ours that a pass wrote: the form in which it was found."""

    form: str


def find_gemm(node: fx.Node) -> Gemm | None:
    """The weight gradient's GEMM of which `node` is the result, if it has one of the known forms."""
    for form in _BY_TARGET.get(node.target, ()) if node.op == "call_function" else ():
        gemm = form.find(node)
        if gemm is not None:
            gemm.form = form
            return gemm
    return None


def write_gemm(graph: fx.Graph, gemm: Gemm, dtype: torch.dtype) -> fx.Node:
    """Insert a GEMM's computation in `dtype` at the graph's insertion point; its form is noted on our op."""
    emit = GraphEmit(graph, like=gemm.node)
    result = gemm.write(emit, dtype)
    for node in emit.nodes:
        if node.target in OWN_GEMMS:
            node.meta[NOTE] = GemmNote(form_of(gemm))
    return result


def form_of(gemm: Gemm) -> str:
    """The form in which the model wrote a GEMM, whatever a pass has made of it since."""
    note = gemm.node.meta.get(NOTE)
    return note.form if isinstance(note, GemmNote) else gemm.form.name


# Dense and grouped.


def find_mm(node: fx.Node) -> Gemm | None:
    """`mm(dy^T, x)`; of a single row also `mul(dy [N, 1], x [1, K])`, as Inductor writes it."""
    if node.target is not aten.mm.default and not is_outer_product(node):
        return None
    a, b = _args(node)
    return Gemm(node, [a, b], lambda emit, dtype: emit(gtp.dense_wgrad.default, _swapped(emit, a), b, dtype))


def find_grouped_mm(node: fx.Node) -> Gemm | None:
    """`_grouped_mm(dy^T, x, offs)`."""
    if not is_grouped_wgrad_mm(node):
        return None
    a, b, offs = _args(node)[:3]
    return Gemm(
        node, [a, b, offs], lambda emit, dtype: emit(gtp.grouped_wgrad.default, _swapped(emit, a), b, offs, dtype)
    )


def find_fallback(node: fx.Node) -> Gemm | None:
    """The second result of the op that Hugging Face puts for `_grouped_mm` where that takes no other dtype than bf16.

    Known by name: transformers may not be installed. Its first result, the input gradient, stays the op's.
    """
    source, index = _args(node)
    name = getattr(getattr(source.target, "_schema", None), "name", "")
    if index != 1 or name != "transformers::grouped_mm_fallback_backward":
        return None
    x, _, offs, dy = _args(source)

    def write(emit: Emit, dtype: torch.dtype) -> Any:
        ends = offs
        if offs.meta["val"].dtype != torch.int32:
            ends = emit(prims.convert_element_type.default, offs, torch.int32)
        return emit(gtp.grouped_wgrad.default, x, dy, ends, dtype)

    return Gemm(node, [x, dy, offs], write)


def find_own(node: fx.Node) -> Gemm | None:
    """`gtp::dense_wgrad` and `gtp::grouped_wgrad`."""
    *operands, _ = _args(node)
    return Gemm(node, operands, lambda emit, dtype: emit(node.target, *operands, dtype))


def _args(node: fx.Node) -> list[Any]:
    return list(node.args)


def is_grouped_wgrad_mm(node: fx.Node) -> bool:
    """Whether a `_grouped_mm` contracts over ragged rows (2-D x 2-D with offsets), which only a wgrad does."""
    a, b, *rest = node.args
    return (
        isinstance(a, fx.Node)
        and isinstance(b, fx.Node)
        and a.meta["val"].ndim == 2
        and b.meta["val"].ndim == 2
        and bool(rest)
        and rest[0] is not None
    )


def is_outer_product(node: fx.Node) -> bool:
    """Whether a multiplication is the wgrad of a single row, `[N, 1] * [1, K]`: Inductor writes that GEMM so."""
    if node.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    a, b = (tuple(arg.meta["val"].shape) for arg in node.args)  # type: ignore[union-attr]
    return len(a) == len(b) == 2 and a[1] == 1 and b[0] == 1 and a[0] != 1 and b[1] != 1


# Batched.


def find_bmm(node: fx.Node) -> Gemm | None:
    """`bmm(dy^T, x)`: experts with equally many rows (capacity factor), in whichever einsum it stood."""
    product = product_at(node)
    if product is None:
        return None
    a, b = product.a, product.b
    return Gemm(
        node,
        [a, b],
        lambda emit, dtype: emit(gtp.dense_wgrad.default, _swapped(emit, a), b, dtype),
        product.inside[:-1],
    )


def find_batch_sum(node: fx.Node) -> Gemm | None:
    """`sum(bmm(dy^T, x), batch)`: the summed part of the batch becomes rows of the GEMM."""
    product = product_behind(node.args[0])
    if product is None:
        return None
    summed = _summed(node)
    rows = sorted(d for i in summed if (d := product.dims[i]) is not None)
    if not all(d.is_batch for d in rows):
        return None
    kept = [d for i, d in enumerate(product.dims) if i not in summed and d is not None]
    experts = sorted(d for d in kept if d.is_batch)
    matrix = [d for d in kept if not d.is_batch]
    if any(d.part for d in matrix):
        return None
    capacity = product.b.meta["val"].shape[1]
    # `view` can be left one size of those that it makes rows of; all others are numbers.
    unknown = [s for s in (capacity, *(d.size for d in rows)) if not isinstance(s, int)]
    if not all(isinstance(d.size, int) for d in (*experts, *matrix)) or (experts and len(unknown) > 1):
        return None

    def write(emit: Emit, dtype: torch.dtype) -> Any:
        sides = [_fold(emit, t, experts, rows) for t in _sides(emit, product, matrix)]
        dw = emit(gtp.dense_wgrad.default, *sides, dtype)
        written = [*experts, *matrix]
        if kept != written:
            dw = emit(aten.view.default, dw, [d.size for d in written])
            dw = emit(aten.permute.default, dw, [written.index(d) for d in kept])
        return _shaped(emit, dw, node.meta["val"].shape)

    return Gemm(node, [product.a, product.b], write, product.inside)


def find_picked(node: fx.Node) -> Gemm | None:
    """`index_put(0, ids, bmm(dy^T, x), accumulate)`: a weight was picked for each entry of the batch, `weight[ids]`.

    The rows are sorted by expert, on the device; the product, a matrix for each of them, never exists. A row may pick
    several (`einsum("sk,sank->san", x, weight[ids])`): then its matrices stand side by side in the product.
    """
    scatter = _accumulated(node)
    product = product_behind(scatter[2]) if scatter else None
    if scatter is None or product is None:
        return None
    base, ids, put = scatter
    ndim = ids.meta["val"].ndim
    picks, features = ([d for d in dims if d is not None] for dims in (product.dims[:ndim], product.dims[ndim:]))
    several = next((d for d in picks if not d.is_batch), None)
    capacity = product.b.meta["val"].shape[1]
    if not _are_picks(picks, features, several) or not _is_zero(base) or not _is_whole(base, ids, put):
        return None
    if several is not None and not isinstance(capacity, int):
        return None

    def write(emit: Emit, dtype: torch.dtype) -> Any:
        order, offs = sort_by_expert(emit, ids, base.meta["val"].shape[0])
        sides = _sides(emit, product, features)
        if several is not None:
            axes = (2, 1) if features and features[0].axis == 2 else (1, 2)
            sides = [
                _each_pick(emit, t, capacity, several.size, axis == several.axis)
                for t, axis in zip(sides, axes, strict=True)
            ]
        rows = [pick_rows(emit, t, order) for t in sides]
        dw = emit(gtp.grouped_wgrad.default, *rows, times_rows(emit, offs, product.b), dtype)
        return _shaped(emit, dw, node.meta["val"].shape)

    inside = [*product.inside, base]
    likes = [n for n in base.all_input_nodes if n not in inside]
    return Gemm(node, [product.a, product.b, ids, *likes], write, inside)


def _are_picks(picks: Sequence[Dim], features: Sequence[Dim], several: Dim | None) -> bool:
    """Whether these dims are `[*batch, *features]`, or `[*batch, A, *features]` with A split off from a feature."""
    batch = [d for d in picks if d.is_batch]
    if batch != sorted(batch) or any(d.is_batch for d in features):
        return False
    if several is None:
        return not any(d.part for d in features)
    parts = [(d.axis, d.part) for d in features if d.part]
    return list(picks) == [*batch, several] and several.part == (0,) and parts == [(several.axis, (1,))]


def _each_pick(emit: Emit, x: fx.Node, capacity: int, count: int, is_split: bool) -> Any:
    """A row for each of its `count` picks: `x [B, C, A * N]` as `[B * A, C, N]`, or `x [B, C, K]` repeated."""
    features = emit.value(x).shape[-1]
    if is_split:
        x = emit(aten.reshape.default, x, [-1, capacity, count, features // count])
        x = emit(aten.permute.default, x, [0, 2, 1, 3])
    else:
        x = emit(aten.expand.default, emit(aten.unsqueeze.default, x, 1), [-1, count, -1, -1])
    return emit(aten.reshape.default, x, [-1, capacity, emit.value(x).shape[-1]])


def _summed(node: fx.Node) -> list[int]:
    ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    dims = node.args[1] if len(node.args) > 1 else None
    return [d % ndim for d in dims] if dims else list(range(ndim))  # type: ignore[union-attr, operator]


def _accumulated(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """What a scatter along dim 0 adds to, where, and what: `(base, ids, put)`."""
    if node.target is aten.index_add.default:
        base, dim, ids, put = node.args
        return (base, ids, put) if dim == 0 and node.kwargs.get("alpha", 1) == 1 else None  # type: ignore[return-value]
    base, indices, put, *accumulate = node.args
    if len(indices) != 1 or indices[0] is None or accumulate != [True]:  # type: ignore[arg-type, index]
        return None
    return base, indices[0], put  # type: ignore[return-value, index]


def _is_zero(node: fx.Node) -> bool:
    if node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default):
        return True
    if node.target in (aten.full.default, aten.full_like.default):
        return bool(node.args[1] == 0)
    return node.target is aten.new_full.default and bool(node.args[2] == 0)


def _is_whole(base: fx.Node, ids: fx.Node, put: fx.Node) -> bool:
    """Whether the matrix `put[i]` goes to the matrix `base[ids[i]]`, nothing broadcast, no mask; of sizes known now."""
    given, into, at = put.meta["val"].shape, base.meta["val"].shape, ids.meta["val"]
    expected = (*at.shape, *into[1:])
    return (
        at.dtype in (torch.int32, torch.int64)
        and at.ndim > 0
        and len(into) == 3
        and all(isinstance(size, int) for size in into)
        and len(given) == len(expected)
        and all(statically_known_true(a == b) for a, b in zip(given, expected, strict=True))
    )


# What they are written with.


def transposed(node: fx.Node) -> fx.Node | None:
    """The tensor of which `node` is the (batched) transpose, if it was made that way."""
    if node.op != "call_function":
        return None
    ndim = node.meta["val"].ndim if isinstance(node.meta.get("val"), torch.Tensor) else 0
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    is_transpose = (
        node.target is aten.t.default
        or (node.target is aten.permute.default and [d % ndim for d in node.args[1]] == swapped)  # type: ignore[union-attr, operator]
        or (node.target is aten.transpose.int and {d % ndim for d in node.args[1:]} == {ndim - 1, ndim - 2})  # type: ignore[operator]
    )
    return node.args[0] if is_transpose else None  # type: ignore[return-value]


def _swapped(emit: Emit, x: fx.Node) -> Any:
    """`x` with its last two dims swapped."""
    ndim = x.meta["val"].ndim
    return transposed(x) or emit(aten.permute.default, x, [*range(ndim - 2), ndim - 1, ndim - 2])


def _sides(emit: Emit, product: Product, matrix: Sequence[Dim]) -> list[Any]:
    """`dy [B, C, M]` and `x [B, C, K]`, the other way round where the result is wanted as `[K, M]`."""
    sides = [_swapped(emit, product.a), product.b]
    return sides[::-1] if matrix and matrix[0].axis == 2 else sides


def _fold(emit: Emit, x: Any, experts: Sequence[Dim], rows: Sequence[Dim]) -> Any:
    """`x [B, C, K]` with a part of its batch among the rows: `[E, R, K]`, or `[R, K]` without experts."""
    *_, capacity, features = emit.value(x).shape
    if not experts:
        return emit(aten.reshape.default, x, [-1, features])
    batch = sorted([*experts, *rows])
    if batch != [*experts, *rows]:
        sizes = [d.size for d in batch] + [capacity]
        x = emit(aten.view.default, x, [s if isinstance(s, int) else -1 for s in sizes] + [features])
        order = [batch.index(d) for d in (*experts, *rows)]
        x = emit(aten.permute.default, x, [*order, len(batch), len(batch) + 1])
    return emit(aten.reshape.default, x, [math.prod(d.size for d in experts), -1, features])


def _shaped(emit: Emit, x: Any, shape: Sequence[Any]) -> Any:
    return x if tuple(emit.value(x).shape) == tuple(shape) else emit(aten.reshape.default, x, list(shape))


# The first form that finds counts.
FORMS: tuple[Form, ...] = (
    Form("gtp", find_own, OWN_GEMMS),
    Form("mm", find_mm, (aten.mm.default, aten.mul.Tensor)),
    Form("grouped_mm", find_grouped_mm, (aten._grouped_mm.default,), is_fused=True),
    Form("fallback", find_fallback, (operator.getitem,)),
    Form("bmm", find_bmm, (aten.bmm.default, aten.mul.Tensor)),
    Form("batch_sum", find_batch_sum, (aten.sum.dim_IntList,), is_fused=True),
    Form(
        "picked",
        find_picked,
        (aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default),
        is_fused=True,
    ),
)

_BY_TARGET: dict[Any, list[Form]] = {}
for _form in FORMS:
    for _target in _form.targets:
        _BY_TARGET.setdefault(_target, []).append(_form)
