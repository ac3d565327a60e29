"""Triton kernels on CPU tensors. Not collected by name: test_triton_interpreter.py runs it with TRITON_INTERPRET=1."""

import pytest
import torch
from kernel_testing import (
    CASES,
    DTYPES,
    LAYOUTS,
    Case,
    case_id,
    cut_into_parts,
    dtype_id,
    linear_float64,
    relative_error,
    same_bits,
    wgrad_float64,
)
from torch import Tensor

from gtp_compile.kernels.grouped_linear.triton import grouped_linear_triton
from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_into_triton, grouped_wgrad_triton

# The interpreter truncates where a GPU rounds to nearest, so a narrow output is held to one unit in the last place.
ONE_ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def fresh(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    dw = torch.full((offs.shape[0], dy.shape[1], x.shape[1]), torch.nan, dtype=out_dtype)
    if dw.numel():
        grouped_wgrad_triton(dy, x, offs, dw, accumulate=False)
    return dw


def linear(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    y = torch.full((x.shape[0], weight.shape[1]), torch.nan, dtype=x.dtype)
    if y.numel():
        grouped_linear_triton(x, weight, offs, y)
    return y


# Strides do not meet dtypes in the kernels, so each is varied alone: the interpreter takes a tenth of a second a call.
VARIANTS = [(dtype, "contiguous") for dtype in DTYPES] + [(torch.float32, layout) for layout in LAYOUTS[1:]]


@pytest.mark.parametrize(("dtype", "layout"), VARIANTS, ids=[f"{dtype_id(d)}-{layout}" for d, layout in VARIANTS])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_grouped_wgrad(case: Case, dtype: torch.dtype, layout: str) -> None:
    dy = case.matrix(case.n, dtype, layout=layout, seed=1)
    x = case.matrix(case.k, dtype, layout=layout, seed=2)
    dw = fresh(dy, x, case.offs())
    assert relative_error(dw, wgrad_float64(dy, x, case.slices)) <= 1e-6
    for expert, count in enumerate(case.counts):
        assert count or not dw[expert].any()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[6], CASES[7]], ids=case_id)
def test_grouped_wgrad_stores_parts(case: Case, dim: int) -> None:
    dy = case.matrix(case.n, torch.float32, layout="contiguous", seed=1)
    x = case.matrix(case.k, torch.float32, layout="contiguous", seed=2)
    dy[case.slices[0]] = torch.nan  # padding is zero all the same
    whole = cut_into_parts(fresh(dy, x, case.offs()), dim, 4)
    dw = torch.full(whole.shape, torch.nan)
    grouped_wgrad_triton(dy, x, case.offs(), dw, accumulate=False, split_dim=dim)
    assert same_bits(dw, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_grouped_wgrad_stores_operand_dtype(dtype: torch.dtype) -> None:
    case = CASES[3]
    dy = case.matrix(case.n, dtype, layout="contiguous", seed=1)
    dw = fresh(dy, dy, case.offs(), dtype)
    assert dw.dtype == dtype
    assert relative_error(dw, wgrad_float64(dy, dy, case.slices)) <= ONE_ULP[dtype]


@pytest.mark.parametrize("case", [c for c in CASES if c.counts and c.n * c.k], ids=case_id)
def test_grouped_wgrad_into_outputs_of_their_own(case: Case) -> None:
    dy = case.matrix(case.n, torch.float32, layout="contiguous", seed=1)
    x = case.matrix(case.k, torch.float32, layout="contiguous", seed=2)
    outs: list[torch.Tensor | None] = [torch.full((case.n, case.k), torch.nan) for _ in case.counts]
    outs[-1] = None
    grouped_wgrad_into_triton(dy, x, case.offs(), outs)
    for out, want in zip(outs, wgrad_float64(dy, x, case.slices), strict=True):
        assert out is None or relative_error(out, want) <= 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[6]], ids=case_id)
def test_grouped_wgrad_adds(case: Case, layout: str) -> None:
    dy = case.matrix(case.n, torch.float32, layout="contiguous", seed=1)
    x = case.matrix(case.k, torch.float32, layout="contiguous", seed=2)
    old = torch.randn(len(case.counts), case.n, case.k).masked_fill_(
        torch.tensor(case.counts)[:, None, None] == 0, -0.0
    )
    total = old.clone() if layout == "contiguous" else old.mT.clone(memory_format=torch.contiguous_format).mT
    grouped_wgrad_triton(dy, x, case.offs(), total, accumulate=True)
    for expert, (count, dw) in enumerate(zip(case.counts, fresh(dy, x, case.offs()), strict=True)):
        assert same_bits(total[expert], old[expert] + dw if count else old[expert])


WEIGHTS = [(dtype, "fprop") for dtype in DTYPES] + [(torch.float32, "dgrad")]


@pytest.mark.parametrize(("dtype", "role"), WEIGHTS, ids=[f"{dtype_id(d)}-{role}" for d, role in WEIGHTS])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_grouped_linear(case: Case, dtype: torch.dtype, role: str) -> None:
    x = case.matrix(case.k, dtype, layout="contiguous", seed=1)
    if role == "fprop":
        weight = torch.randn(len(case.counts), case.n, case.k).to(dtype)
    else:
        weight = torch.randn(len(case.counts), case.k, case.n).to(dtype).transpose(1, 2)
    y = linear(x, weight, case.offs())
    assert relative_error(y, linear_float64(x, weight, case.slices)) <= ONE_ULP[dtype]
    assert not y[sum(case.counts) :].any()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[4]], ids=case_id)
def test_grouped_linear_over_parts(case: Case, dim: int) -> None:
    x = case.matrix(case.k, torch.float32, layout="contiguous", seed=1)
    weight, bias = torch.randn(len(case.counts), case.n, case.k), torch.randn(len(case.counts), case.n)
    parts = cut_into_parts(weight, dim, 3)
    padding = cut_into_parts(torch.ones_like(weight), dim, 3) == 0
    y = torch.full((case.rows, case.n), torch.nan)
    grouped_linear_triton(x, parts.masked_fill(padding, torch.nan), case.offs(), y, bias, dim)
    expected = linear_float64(x, weight, case.slices)
    for expert, routed in enumerate(case.slices):
        expected[routed] += bias[expert]
    assert relative_error(y, expected) <= 1e-6
    assert not y[sum(case.counts) :].any()


def test_wrong_offsets_stay_inside_the_buffers() -> None:
    x = torch.randn(6, 4)
    offs = torch.tensor([4, 900], dtype=torch.int32)
    clamped = torch.tensor([4, 6], dtype=torch.int32)
    weight = torch.randn(2, 3, 4)
    assert torch.equal(linear(x, weight, offs), linear(x, weight, clamped))
    assert torch.equal(fresh(x, x, offs), fresh(x, x, clamped))
    offs = torch.tensor([-3, 4, 2], dtype=torch.int32)
    clamped = torch.tensor([0, 4, 4], dtype=torch.int32)
    assert torch.equal(fresh(x, x, offs), fresh(x, x, clamped))
