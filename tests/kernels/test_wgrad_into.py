"""Weight gradients written into memory that the caller owns: the buffers that distributed weights bring."""

import pytest
import torch
from kernel_testing import (
    CASES,
    DEVICES,
    DTYPES,
    FLOAT32_BOUND,
    RAGGED,
    Case,
    case_id,
    dtype_id,
    error_bound,
    relative_error,
    wgrad_float64,
)
from torch import Tensor

from gtp_compile.kernels import dense_wgrad_into, grouped_wgrad_into


def operands(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    dy = case.matrix(case.n, dtype, device, layout="contiguous", seed=1)
    return dy, case.matrix(case.k, dtype, device, layout="contiguous", seed=2)


def nans(case: Case, dtype: torch.dtype, device: str) -> list[Tensor]:
    """One output per expert, each in memory of its own."""
    return [torch.full((case.n, case.k), torch.nan, dtype=dtype, device=device) for _ in case.counts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_discrete_outputs(case: Case, dtype: torch.dtype, device: str) -> None:
    dy, x = operands(case, dtype, device)
    expected = wgrad_float64(dy, x, case.slices)
    for out_dtype in {dtype, torch.float32}:
        outs = nans(case, out_dtype, device)
        grouped_wgrad_into(dy, x, case.offs(device), outs)
        bound = FLOAT32_BOUND[device] if out_dtype == torch.float32 else error_bound(expected, out_dtype, device)
        if outs:
            assert relative_error(torch.stack(outs), expected) <= bound
        for out, count in zip(outs, case.counts, strict=True):
            assert count or not out.any(), "an empty expert must be exactly zero"


@pytest.mark.parametrize("device", DEVICES)
def test_a_stacked_output(device: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, device)
    out = torch.full((len(RAGGED.counts), RAGGED.n, RAGGED.k), torch.nan, device=device)
    grouped_wgrad_into(dy, x, RAGGED.offs(device), out)
    assert relative_error(out, wgrad_float64(dy, x, RAGGED.slices)) <= FLOAT32_BOUND[device]


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_that_nobody_wants_and_mixed_dtypes_and_strides(device: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, device)
    expected = wgrad_float64(dy, x, RAGGED.slices)
    outs: list[Tensor | None] = list(nans(RAGGED, torch.float32, device))
    outs[0] = outs[2] = None
    grouped_wgrad_into(dy, x, RAGGED.offs(device), outs)
    assert relative_error(outs[3], expected[3]) <= FLOAT32_BOUND[device]
    outs[3] = torch.empty(RAGGED.n, RAGGED.k, dtype=torch.bfloat16, device=device)
    outs[5] = torch.empty(RAGGED.k, RAGGED.n, device=device).t()
    grouped_wgrad_into(dy, x, RAGGED.offs(device), outs)
    assert relative_error(outs[3], expected[3]) <= error_bound(expected[3], torch.bfloat16, device)
    assert relative_error(outs[5], expected[5]) <= FLOAT32_BOUND[device]
    grouped_wgrad_into(dy, x, RAGGED.offs(device), [None] * len(outs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_a_dense_output(rows: int, dtype: torch.dtype, device: str) -> None:
    case = Case("dense", (rows,), n=24, k=40)
    dy, x = operands(case, dtype, device)
    expected = wgrad_float64(dy, x, case.slices)[0]
    for out_dtype in DTYPES:
        out = torch.full((case.n, case.k), torch.nan, dtype=out_dtype, device=device)
        dense_wgrad_into(dy, x, out)
        bound = FLOAT32_BOUND[device] if out_dtype == torch.float32 else error_bound(expected, out_dtype, device)
        assert relative_error(out, expected) <= bound


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.empty(24, 39), ValueError, r"must have the shape \(24, 40\), got \(24, 39\)"),
        (torch.empty(24, 40, dtype=torch.float64), TypeError, r"torch\.float64"),
        (torch.empty(24, 40, device="meta"), ValueError, "must be on the device of dy"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_outputs_that_do_not_fit_are_refused(out: Tensor, error: type[Exception], message: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, "cpu")
    with pytest.raises(error, match=message):
        grouped_wgrad_into(dy, x, RAGGED.offs(), [out, *nans(RAGGED, torch.float32, "cpu")[1:]])
    with pytest.raises(error, match=message):
        dense_wgrad_into(dy, x, out)


def test_one_output_an_expert() -> None:
    dy, x = operands(RAGGED, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="E, the number of experts"):
        grouped_wgrad_into(dy, x, RAGGED.offs(), nans(RAGGED, torch.float32, "cpu")[1:])
