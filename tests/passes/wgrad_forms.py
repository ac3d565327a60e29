"""Every form of a weight gradient that the passes follow, written by hand in the operators that Inductor sees.

A form computes a gradient from operands. It derives every dtype from its operands, so that the same function gives the
exact gradient from float64 operands.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tiny_models import BF16, IN, OUT, ROWS, ends_of
from torch import Tensor

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a weight gradient is written.

    Attributes:
        compute: operands -> gradient.
        gemms, reductions: how many of each its chain has.
        kept: how many of the GEMMs write float32 as they stand.
        exact: the gradient from float64 operands, where `compute` can't be run on them.
    """

    name: str
    compute: Callable[..., Tensor]
    gemms: int = 1
    reductions: int = 0
    exact: Callable[..., Tensor] | None = None
    kept: int = 0

    def reference(self, *operands: Tensor) -> Tensor:
        doubles = [t.double() if t.is_floating_point() else t for t in operands]
        return (self.exact or self.compute)(*doubles)


def form_id(form: Form) -> str:
    return form.name


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy bf16[R, N], x bf16[R, K], ids i64[R], offs i32[E]."""
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(ROWS, OUT, generator=generator).to(BF16)
    x = torch.randn(ROWS, IN, generator=generator).to(BF16)
    return dy, x, torch.arange(ROWS) % 5, ends_of(7, 0, 12, 5)


def mm(dy: Tensor, x: Tensor) -> Tensor:  # [N, K]
    return aten.mm.default(aten.permute.default(dy, [1, 0]), x)


def _full(like: Tensor, *shape: int) -> Tensor:
    return aten.full.default(list(shape), 0.0, dtype=like.dtype)


def _stack(*parts: Tensor) -> Tensor:
    return aten.cat.default([aten.unsqueeze.default(p, 0) for p in parts], 0)


def _grouped_loop(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:  # [E, N, K]
    starts = [0, *offs.tolist()[:-1]]
    return torch.stack([dy[a:b].t() @ x[a:b] for a, b in zip(starts, offs.tolist(), strict=True)])


def _sliced(dy: Tensor, x: Tensor) -> Tensor:  # two halves of a fused weight [2N, K]
    top = aten.slice_backward.default(mm(dy, x), [2 * OUT, IN], 0, 0, OUT, 1)
    bottom = aten.slice_backward.default(mm(dy, x), [2 * OUT, IN], 0, OUT, 2 * OUT, 1)
    return aten.add.Tensor(top, bottom)


def _selected(dy: Tensor, x: Tensor) -> Tensor:  # two experts of a stack [E, N, K], read one by one
    first = aten.select_backward.default(mm(dy, x), [4, OUT, IN], 0, 0)
    return aten.add.Tensor(first, aten.select_backward.default(mm(dy, x), [4, OUT, IN], 0, 1))


def _pasted(dy: Tensor, x: Tensor) -> Tensor:  # the same two, as Inductor writes them
    zeros = _full(dy, 4, OUT, IN)
    first = aten.select_scatter.default(zeros, mm(dy, x), 0, 0)
    return aten.slice_scatter.default(first, aten.unsqueeze.default(mm(dy, x), 0), 0, 1, 2)


def _norm(dy: Tensor) -> Tensor:  # float32 inside, rounded at the end, as norms are
    wide = prims.convert_element_type.default(dy, torch.promote_types(dy.dtype, torch.float32))
    return prims.convert_element_type.default(aten.sum.dim_IntList(aten.mul.Tensor(wide, wide), [0]), dy.dtype)


def _round_trip(dy: Tensor, x: Tensor) -> Tensor:  # a cast up and down again, as mixed precision leaves them
    wide = prims.convert_element_type.default(mm(dy, x), torch.promote_types(dy.dtype, torch.float32))
    return aten.view.default(prims.convert_element_type.default(wide, dy.dtype), [OUT, IN])


_MM_FORMS = (
    Form("mm", lambda dy, x, ids, offs: mm(dy, x)),
    Form("mm_transposed_weight", lambda dy, x, ids, offs: aten.permute.default(mm(x, dy), [1, 0])),
    Form("mm_of_t", lambda dy, x, ids, offs: aten.mm.default(aten.t.default(dy), x)),
    Form("mm_of_transpose", lambda dy, x, ids, offs: aten.mm.default(aten.transpose.int(dy, 0, 1), x)),
    Form("mm_of_no_transpose", lambda dy, x, ids, offs: aten.mm.default(aten.clone.default(aten.t.default(dy)), x)),
    Form("outer_product", lambda dy, x, ids, offs: aten.mul.Tensor(aten.view.default(dy[:1], [OUT, 1]), x[:1])),
    Form(
        "grouped_mm",
        lambda dy, x, ids, offs: aten._grouped_mm.default(aten.permute.default(dy, [1, 0]), x, offs),
        exact=lambda dy, x, ids, offs: _grouped_loop(dy, x, offs),
    ),
    Form(
        "grouped_mm_transposed_weight",
        lambda dy, x, ids, offs: aten.permute.default(
            aten._grouped_mm.default(aten.permute.default(x, [1, 0]), dy, offs), [0, 2, 1]
        ),
        exact=lambda dy, x, ids, offs: _grouped_loop(dy, x, offs),
    ),
)

C = 3  # rows of each of the eight experts in a batch


def _batch(t: Tensor) -> Tensor:  # [R, *] -> [E, C, *]
    return aten.view.default(t, [ROWS // C, C, t.shape[-1]])


def bmm(dy: Tensor, x: Tensor) -> Tensor:  # [B, C, N], [B, C, K] -> [B, N, K]
    return aten.bmm.default(aten.permute.default(dy, [0, 2, 1]), x)


def outer(dy: Tensor, x: Tensor) -> Tensor:  # [R, N, K], as Inductor writes a bmm of single rows
    wide = torch.promote_types(dy.dtype, torch.float32)
    column = prims.convert_element_type.default(aten.unsqueeze.default(dy, 2), wide)
    row = prims.convert_element_type.default(aten.unsqueeze.default(x, 1), wide)
    return prims.convert_element_type.default(aten.mul.Tensor(column, row), dy.dtype)


def put(ids: Tensor, rows: Tensor, experts: int = 8) -> Tensor:  # into [E, N, K]
    return aten.index_put.default(_full(rows, experts, *rows.shape[-2:]), [ids], rows, True)


def _picked_pairs(dy: Tensor, x: Tensor, ids: Tensor, swapped: bool) -> Tensor:
    """Two experts for a row, as `einsum("sk,sank->san", x, w[ids])` leaves them: `[R / 2, 2]` ids, side by side."""
    pairs, rows = aten.view.default(dy, [ROWS // 2, 2 * OUT]), x[: ROWS // 2]
    at = aten.view.default(ids, [ROWS // 2, 2])
    if swapped:
        dw = aten.view.default(outer(pairs, rows), [ROWS // 2, 2, OUT, IN])
    else:
        dw = aten.permute.default(aten.view.default(outer(rows, pairs), [ROWS // 2, IN, 2, OUT]), [0, 2, 3, 1])
    return put(at, dw)


def _put_twice(dy: Tensor, x: Tensor, ids: Tensor) -> Tensor:  # the outer scatter's base is no zero
    return aten.index_put.default(put(ids, outer(dy, x)), [ids], outer(dy, x), True)


def _einsum(dy: Tensor, x: Tensor) -> Tensor:  # what "ecd,efd->ecf" leaves behind the bmm
    dw = aten.view.default(bmm(_batch(x), _batch(dy)), [ROWS // C, IN, OUT, 1])
    dw = aten.permute.default(aten.permute.default(dw, [0, 3, 2, 1]), [0, 2, 3, 1])
    return aten.squeeze.dim(dw, 3)


def _grouped_batch(dy: Tensor, x: Tensor) -> Tensor:  # "gecd,edf->gecf": a sum over two groups
    dw = aten.view.default(bmm(_batch(dy), _batch(x)), [2, 4, OUT, IN])
    return aten.squeeze.dim(aten.sum.dim_IntList(dw, [0], True), 0)


_BMM_FORMS = (
    Form("bmm", lambda dy, x, ids, offs: bmm(_batch(dy), _batch(x))),
    Form("bmm_transposed_weight", lambda dy, x, ids, offs: aten.permute.default(bmm(_batch(x), _batch(dy)), [0, 2, 1])),
    Form("bmm_of_mT", lambda dy, x, ids, offs: aten.bmm.default(aten.transpose.int(_batch(dy), 2, 1), _batch(x))),
    Form("bmm_of_no_transpose", lambda dy, x, ids, offs: aten.bmm.default(_batch(dy).mT.contiguous(), _batch(x))),
    Form("bmm_of_einsum", lambda dy, x, ids, offs: _einsum(dy, x)),
    Form("bmm_of_single_rows", lambda dy, x, ids, offs: outer(dy, x), kept=1),
)

_BATCH_SUM_FORMS = (
    Form("batch_sum", lambda dy, x, ids, offs: aten.sum.dim_IntList(bmm(_batch(dy), _batch(x)), [0])),
    Form(
        "batch_sum_keepdim",
        lambda dy, x, ids, offs: aten.view.default(
            aten.sum.dim_IntList(bmm(_batch(dy), _batch(x)), [0], True), [OUT, IN]
        ),
    ),
    Form(
        "batch_sum_transposed_weight",
        lambda dy, x, ids, offs: aten.sum.dim_IntList(aten.permute.default(bmm(_batch(x), _batch(dy)), [0, 2, 1]), [0]),
    ),
    Form("batch_sum_of_groups", lambda dy, x, ids, offs: _grouped_batch(dy, x)),
    Form(
        "batch_sum_of_inner_groups",
        lambda dy, x, ids, offs: aten.sum.dim_IntList(
            aten.view.default(bmm(_batch(dy), _batch(x)), [4, 2, OUT, IN]), [-3]
        ),
    ),
    Form(
        "batch_sum_in_another_order",  # a weight [N, E, K]
        lambda dy, x, ids, offs: aten.sum.dim_IntList(
            aten.permute.default(aten.view.default(bmm(_batch(dy), _batch(x)), [2, 4, OUT, IN]), [2, 0, 1, 3]), [1]
        ),
    ),
    Form("batch_sum_of_single_rows", lambda dy, x, ids, offs: aten.sum.dim_IntList(outer(dy, x), [0])),
)

_PICKED_FORMS = (
    Form("picked", lambda dy, x, ids, offs: put(ids, outer(dy, x))),
    Form(
        "picked_bmm",
        lambda dy, x, ids, offs: put(ids, bmm(aten.unsqueeze.default(dy, 1), aten.unsqueeze.default(x, 1))),
    ),
    Form("picked_from_the_end", lambda dy, x, ids, offs: put(aten.sub.Tensor(ids, 3), outer(dy, x))),
    Form("picked_several_rows", lambda dy, x, ids, offs: put(ids[: ROWS // C], bmm(_batch(dy), _batch(x)))),
    Form(
        "picked_transposed_weight",
        lambda dy, x, ids, offs: put(ids, aten.permute.default(outer(x, dy), [0, 2, 1])),
    ),
    Form(
        "picked_many_ids",
        lambda dy, x, ids, offs: put(
            aten.view.default(ids, [ROWS // 2, 2]), aten.view.default(outer(dy, x), [ROWS // 2, 2, OUT, IN])
        ),
    ),
    Form("picked_pairs", lambda dy, x, ids, offs: _picked_pairs(dy, x, ids, swapped=False)),
    Form("picked_pairs_swapped", lambda dy, x, ids, offs: _picked_pairs(dy, x, ids, swapped=True)),
    Form(
        "picked_by_index_select",
        lambda dy, x, ids, offs: aten.index_add.default(_full(dy, 8, OUT, IN), 0, ids, outer(dy, x)),
    ),
    Form(
        "picked_into_new_zeros",
        lambda dy, x, ids, offs: aten.index_put.default(
            aten.new_zeros.default(dy, [8, OUT, IN]), [ids.int()], outer(dy, x), True
        ),
    ),
)

_PATH_FORMS = (
    Form("sum_of_uses", lambda dy, x, ids, offs: aten.add.Tensor(mm(dy, x), mm(dy, x)), gemms=2),
    Form("slice_backward", lambda dy, x, ids, offs: _sliced(dy, x), gemms=2),
    Form("select_backward", lambda dy, x, ids, offs: _selected(dy, x), gemms=2),
    Form("select_and_slice_scatter", lambda dy, x, ids, offs: _pasted(dy, x), gemms=2),
    Form("stack", lambda dy, x, ids, offs: _stack(*[mm(dy, x)] * 3, mm(dy, x)), gemms=2),
    Form("aten_stack", lambda dy, x, ids, offs: aten.stack.default([*[mm(dy, x)] * 3, mm(dy, x)]), gemms=2),
    Form("cat", lambda dy, x, ids, offs: aten.cat.default([mm(dy, x), mm(dy, x)], 0), gemms=2),
    Form("add_to_full", lambda dy, x, ids, offs: aten.add.Tensor(_full(dy, OUT, IN), mm(dy, x))),
    Form(
        "add_to_zeros",
        lambda dy, x, ids, offs: aten.add.Tensor(aten.zeros.default([OUT, IN], dtype=dy.dtype), mm(dy, x)),
    ),
    Form(
        "add_to_new_zeros", lambda dy, x, ids, offs: aten.add.Tensor(aten.new_zeros.default(dy, [OUT, IN]), mm(dy, x))
    ),
    Form("add_to_zeros_like", lambda dy, x, ids, offs: aten.add.Tensor(aten.zeros_like.default(mm(dy, x)), mm(dy, x))),
    Form("scaled", lambda dy, x, ids, offs: aten.div.Tensor(aten.neg.default(aten.mul.Tensor(mm(dy, x), 0.3)), 3.0)),
    Form("casts", lambda dy, x, ids, offs: _round_trip(dy, x)),
    Form("padded", lambda dy, x, ids, offs: aten.constant_pad_nd.default(mm(dy, x), [0, 0, 0, 4])),
    Form("scaled_batch_sum", lambda dy, x, ids, offs: aten.mul.Tensor(bmm(_batch(dy), _batch(x)), 2.0).sum(0), 1, 1),
    Form("picked_into_a_base", lambda dy, x, ids, offs: _put_twice(dy, x, ids), 2, 1, kept=1),
    Form("reshaped", lambda dy, x, ids, offs: aten.view.default(aten.squeeze.dims(mm(dy, x), [0]), [4, OUT * IN // 4])),
)

_REDUCTION_FORMS = (
    Form("sum", lambda dy, x, ids, offs: aten.sum.dim_IntList(dy, [0]), 0, 1),
    Form("sum_keepdim", lambda dy, x, ids, offs: aten.view.default(aten.sum.dim_IntList(dy, [0], True), [OUT]), 0, 1),
    Form("norm", lambda dy, x, ids, offs: _norm(dy), 0, 1),
    Form("sum_of_reductions", lambda dy, x, ids, offs: aten.add.Tensor(dy.sum(0), aten.sum.dim_IntList(dy, [0])), 0, 2),
    Form("index_put", lambda dy, x, ids, offs: aten.index_put.default(_full(dy, 8, OUT), [ids], dy, True), 0, 1),
    Form(
        "index_put_new_zeros",
        lambda dy, x, ids, offs: aten.index_put.default(aten.new_zeros.default(dy, [8, OUT]), [ids], dy, True),
        0,
        1,
    ),
    Form(
        "index_put_empty",  # every row is written
        lambda dy, x, ids, offs: aten.index_put.default(
            aten.empty.memory_format([8, OUT], dtype=dy.dtype), [torch.arange(8)], dy[:8]
        ),
        0,
        1,
    ),
    Form(
        "index_put_twice",
        lambda dy, x, ids, offs: aten.index_put.default(
            aten.index_put.default(_full(dy, 8, OUT), [ids], dy, True), [ids], dy, True
        ),
        0,
        2,
    ),
    Form("index_add", lambda dy, x, ids, offs: aten.index_add.default(_full(dy, 8, OUT), 0, ids, dy), 0, 1),
    Form(
        "scatter_add",
        lambda dy, x, ids, offs: aten.scatter_add.default(_full(dy, 8, OUT), 0, ids.unsqueeze(1).expand(-1, OUT), dy),
        0,
        1,
    ),
    Form("embedding", lambda dy, x, ids, offs: aten.embedding_dense_backward.default(dy, ids, 8, -1, False), 0, 1),
    Form(
        "tied",  # an embedding and an output layer of one weight
        lambda dy, x, ids, offs: aten.add.Tensor(
            mm(dy, x), aten.embedding_dense_backward.default(x, ids, OUT, -1, False)
        ),
        1,
        1,
    ),
)

FORMS = (*_MM_FORMS, *_BMM_FORMS, *_BATCH_SUM_FORMS, *_PICKED_FORMS, *_PATH_FORMS, *_REDUCTION_FORMS)
GEMM_FORMS = tuple(f for f in FORMS if f.gemms)
FUSED_FORMS = (*_BATCH_SUM_FORMS, *_PICKED_FORMS)  # where our kernel does less work in any dtype
