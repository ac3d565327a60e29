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
        exact: the gradient from float64 operands, where `compute` can't be run on them.
    """

    name: str
    compute: Callable[..., Tensor]
    gemms: int = 1
    reductions: int = 0
    exact: Callable[..., Tensor] | None = None

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

FORMS = (*_MM_FORMS, *_PATH_FORMS, *_REDUCTION_FORMS)
GEMM_FORMS = tuple(f for f in FORMS if f.gemms)
