"""The grouped wgrad in the order of a reduce-scatter: the bits of the whole one, cut; zeros behind the end."""

import pytest
import torch
from kernel_testing import (
    CASES,
    DEVICES,
    DTYPES,
    FLOAT32_BOUND,
    RAGGED,
    BadCall,
    Case,
    assert_refused,
    case_id,
    count_guards,
    cut_into_parts,
    dtype_id,
    no_recompiles,
    operands,
    poison_allocator,
    relative_error,
    wgrad_float64,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import grouped_wgrad, grouped_wgrad_parts

PARTS = (1, 2, 5, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_is_the_whole_gradient_cut(case: Case, dtype: torch.dtype, dim: int, device: str) -> None:
    dy, x = operands(case, dtype, device)
    whole = wgrad_float64(dy, x, case.slices)
    for parts in PARTS:
        expected = cut_into_parts(whole, dim, parts)
        if device == "cuda":
            poison_allocator((tuple(expected.shape), torch.float32))
        dw = grouped_wgrad_parts(dy, x, case.offs(device), dim, parts, out_dtype=torch.float32)
        assert dw.dtype == torch.float32 and dw.shape == expected.shape and dw.is_contiguous()
        assert relative_error(dw, expected) <= FLOAT32_BOUND[device]
        assert not dw[expected == 0].any(), "experts without rows and what is behind the end must be exactly zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_has_the_bits_of_the_whole_one(out_dtype: torch.dtype, dim: int, device: str) -> None:
    case = Case("", (10, 0, 161, 28, 0, 5), n=192, k=192, tail=19)
    dy, x = operands(case, torch.bfloat16, device)
    whole = grouped_wgrad(dy, x, case.offs(device), out_dtype=out_dtype)
    for parts in (2, 3, 5):
        dw = grouped_wgrad_parts(dy, x, case.offs(device), dim, parts, out_dtype=out_dtype)
        expected = cut_into_parts(whole, dim, parts)
        if device == "cuda" and parts != 3:  # parts of 96 or 39: the Gluon kernel stores pieces of 64
            assert relative_error(dw, expected) <= (1e-5 if out_dtype == torch.float32 else 1e-2)
        else:
            assert torch.equal(dw, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
def test_padding_is_zero_beside_nan(dim: int, device: str) -> None:
    case = Case("", (9, 70, 0, 5), n=44, k=40)
    dy, x = operands(case, torch.bfloat16, device)
    dy[case.slices[1]] = torch.nan
    x[case.slices[3]] = torch.inf
    for parts in (3, 7, 16):
        dw = grouped_wgrad_parts(dy, x, case.offs(device), dim, parts, out_dtype=torch.float32)
        padding = cut_into_parts(torch.ones(4, case.n, case.k, device=device), dim, parts) == 0
        assert padding.any() and not dw[padding].any()
        assert not dw[:, 1][~padding[:, 1]].isfinite().any()


def call(**changed: object) -> Tensor:
    arguments = {
        "dy": torch.zeros(8, 3, dtype=torch.bfloat16),
        "x": torch.zeros(8, 5, dtype=torch.bfloat16),
        "offs": torch.zeros(2, dtype=torch.int32),
        "dim": 1,
        "parts": 2,
    }
    return grouped_wgrad_parts(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("dim", lambda: call(dim=0), ValueError, ("dim must be 1 (N) or 2 (K)", "got 0")),
    BadCall("parts", lambda: call(parts=0), ValueError, ("parts must be at least 1", "got 0")),
    BadCall("rows", lambda: call(x=torch.zeros(9, 5).bfloat16()), ValueError, ("dy and x", "8 and 9")),
    BadCall("mixed_dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("x", "bfloat16", "float32")),
    BadCall("int64_offs", lambda: call(offs=torch.zeros(2, dtype=torch.int64)), TypeError, ("offs", "int32")),
    BadCall("out_dtype", lambda: call(out_dtype=torch.float64), TypeError, ("out_dtype", "float64")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=shape_env)
    dy = mode.from_tensor(torch.zeros(8, 3), symbolic_context=dynamic)
    with mode:
        x = torch.empty(shape_env.create_unbacked_symint(), 5)
        before = count_guards(shape_env)
        dw = torch.ops.gtp.grouped_wgrad_parts(dy, x, torch.empty(2, dtype=torch.int32), torch.float32, 1, 2)
    assert dw.shape == (2, 2, 2, 5)
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
def test_opcheck(dim: int, device: str) -> None:
    dy, x = (tensor.nan_to_num() for tensor in operands(RAGGED, torch.bfloat16, device))
    arguments = (dy, x, RAGGED.offs(device), torch.float32, dim, 3)
    torch.library.opcheck(torch.ops.gtp.grouped_wgrad_parts.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_once_for_all_row_counts(device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(grouped_wgrad_parts, backend="aot_eager", fullgraph=True)
    cases = [Case("", counts, n=8, k=12) for counts in ((7, 0, 9), (40, 1, 0), (0, 0, 3))]
    for index, case in enumerate(cases):
        dy, x = operands(case, torch.bfloat16, device)
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(x, 0)
        if index == 0:
            compiled(dy, x, case.offs(device), 1, 3)
        with no_recompiles():
            dw = compiled(dy, x, case.offs(device), 1, 3)
        assert torch.equal(dw, grouped_wgrad_parts(dy, x, case.offs(device), 1, 3))
