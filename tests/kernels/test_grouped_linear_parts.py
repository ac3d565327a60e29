"""The grouped linear over a weight in parts, as an all-gather leaves it: fprop and dgrad, on every kernel."""

import pytest
import torch
from kernel_testing import (
    CASES,
    DEVICES,
    DTYPES,
    GPU_MARKS,
    RAGGED,
    BadCall,
    Case,
    assert_refused,
    case_id,
    count_guards,
    cut_into_parts,
    dtype_id,
    error_bound,
    linear_float64,
    poison_allocator,
    relative_error,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gtp_compile.kernels import grouped_linear, grouped_linear_parts

PARTS = (1, 3, 8)
FULL = [c for c in CASES if c.counts and c.n * c.k]


def problem(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, K], w [E, N, K] and bias [E, N]; NaN in the rows that belong to nobody."""
    generator = torch.Generator().manual_seed(4)
    w = torch.randn(len(case.counts), case.n, case.k, generator=generator)
    bias = torch.randn(len(case.counts), case.n, generator=generator)
    x = case.matrix(case.k, dtype, device, layout="contiguous", seed=1)
    return x, w.to(device, dtype), bias.to(device, dtype)


def with_bias(case: Case, y: Tensor, bias: Tensor) -> Tensor:
    y = y.clone()
    for expert, routed in enumerate(case.slices):
        y[routed] += bias[expert].double()
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", FULL, ids=case_id)
def test_matches_float64(case: Case, dtype: torch.dtype, dim: int, device: str) -> None:
    x, w, bias = problem(case, dtype, device)
    expected = linear_float64(x, w, case.slices)
    size = w.shape[dim]
    for parts in PARTS:
        for added in (None, bias):
            want = expected if added is None else with_bias(case, expected, bias)
            if device == "cuda":
                poison_allocator((tuple(expected.shape), dtype))
            y = grouped_linear_parts(x, cut_into_parts(w, dim, parts), case.offs(device), dim, size, bias=added)
            assert y.dtype == dtype and y.is_contiguous()
            assert relative_error(y, want) <= error_bound(want, dtype, device)
            assert not y[sum(case.counts) :].any()


def test_has_the_bits_of_the_whole_weight() -> None:
    x, w, _ = problem(RAGGED, torch.bfloat16, "cpu")
    whole = grouped_linear(x, w, RAGGED.offs())
    for dim in (1, 2):
        y = grouped_linear_parts(x, cut_into_parts(w, dim, 3), RAGGED.offs(), dim, w.shape[dim])
        assert torch.equal(y, whole)


def call(parts: int = 2, chunk: int = 2, size: int = 4, dim: int = 1, **changed: object) -> Tensor:
    arguments: dict[str, object] = {
        "x": torch.zeros(8, 5, dtype=torch.bfloat16),
        "weight": torch.zeros(parts, 3, chunk, 5, dtype=torch.bfloat16),
        "offs": torch.zeros(3, dtype=torch.int32),
        "dim": dim,
        "size": size,
    }
    return grouped_linear_parts(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("experts", lambda: call(dim=0), ValueError, ("dim", "1 (N) or 2 (K)", "got 0")),
    BadCall("size", lambda: call(size=5), ValueError, ("2 parts of 2", "size 5", "gathered")),
    BadCall("features", lambda: call(x=torch.zeros(8, 6).bfloat16()), ValueError, ("x and weight", "6 and 5")),
    BadCall("offs", lambda: call(offs=torch.zeros(4, dtype=torch.int32)), ValueError, ("experts", "4 and 3")),
    BadCall("dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("weight", "float32", "bfloat16", "cast")),
    BadCall("bias", lambda: call(bias=torch.zeros(3, 5).bfloat16()), ValueError, ("bias", "out features", "4 and 5")),
    BadCall("bias_dtype", lambda: call(bias=torch.zeros(3, 4)), TypeError, ("bias", "float32", "cast")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        x = torch.empty(shape_env.create_unbacked_symint(), 5)
        before = count_guards(shape_env)
        offs = torch.empty(3, dtype=torch.int32)
        y = torch.ops.gtp.grouped_linear_parts(x, torch.empty(2, 3, 4, 5), offs, 1, 7)
    assert y.shape[1] == 7
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 2])
def test_opcheck(dim: int, device: str) -> None:
    x, w, bias = problem(RAGGED, torch.bfloat16, device)
    arguments = (x.nan_to_num(), cut_into_parts(w, dim, 3), RAGGED.offs(device), dim, w.shape[dim], bias)
    torch.library.opcheck(torch.ops.gtp.grouped_linear_parts.default, arguments)


TILED = (
    Case("tiles", (0, 300, 128, 0, 65, 1, 513), n=384, k=256, tail=200),
    Case("edges", (77, 0, 130, 3), n=1536, k=192, tail=5),
    Case("last_empty", (129, 64, 0), n=128, k=64),
    Case("none", (0, 0), n=128, k=128, tail=140),
)


@pytest.mark.parametrize("stored", ["k_innermost", "n_innermost"])
@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("case", TILED, ids=case_id)
class TestOnHopper:
    pytestmark = GPU_MARKS

    def test_the_gluon_kernel(self, case: Case, dim: int, parts: int, stored: str) -> None:
        """Against float64, bitwise repeatable, poison in the tail, nothing written around y."""
        from gtp_compile.kernels.grouped_linear.choice import choose_grouped_linear
        from gtp_compile.kernels.grouped_linear.gluon import grouped_linear_gluon

        x, w, bias = problem(case, torch.bfloat16, "cuda")
        split_dim = dim if parts else 0
        weight = cut_into_parts(w, dim, parts) if parts else w
        if stored == "n_innermost":
            weight = weight.mT.contiguous().mT
        buffer = torch.full((case.rows + 2, case.n + 8), torch.nan, dtype=torch.bfloat16, device="cuda")
        y = buffer[1:-1, : case.n]
        if choose_grouped_linear(x, weight, y, split_dim) is not grouped_linear_gluon:
            pytest.skip("this GPU, Triton or split takes the plain kernel")
        expected = with_bias(case, linear_float64(x, w, case.slices), bias)
        grouped_linear_gluon(x, weight, case.offs("cuda"), y, bias, split_dim)
        first = y.clone()
        assert relative_error(first, expected) <= error_bound(expected, torch.bfloat16, "cuda")
        assert not first[sum(case.counts) :].any()
        for _ in range(3):
            grouped_linear_gluon(x, weight, case.offs("cuda"), y, bias, split_dim)
            assert torch.equal(y, first)
        y.fill_(torch.nan)
        assert buffer.isnan().all()
