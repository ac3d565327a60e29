from dataclasses import dataclass

import pytest
import torch
from kernel_testing import (
    DEVICES,
    DTYPES,
    FLOAT32_BOUND,
    GPU_MARKS,
    LAYOUTS,
    BadCall,
    assert_refused,
    count_guards,
    dtype_id,
    error_bound,
    no_recompiles,
    poison_allocator,
    relative_error,
    with_layout,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import dense_wgrad


@dataclass(frozen=True, slots=True)
class DenseCase:
    name: str
    rows: int
    n: int
    k: int
    experts: int = 0  # 0: [R, N] and [R, K], without a dim of experts

    def operands(self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.rows)

        def matrix(columns: int) -> Tensor:
            values = torch.randn(self.rows, 1 if layout == "expanded" else columns, generator=generator)
            return with_layout(values.to(device, dtype), layout, columns)

        pairs = [(matrix(self.n), matrix(self.k)) for _ in range(self.experts or 1)]
        if not self.experts:
            return pairs[0]
        dy, x = (torch.stack(side) for side in zip(*pairs, strict=True))
        # The dim of experts is the outermost one, or (as `permute` of [C, E, N] gives it) the middle one.
        return (
            (dy, x)
            if layout == "contiguous"
            else tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (dy, x))
        )


DENSE_CASES = (
    DenseCase("even", 64, n=32, k=48),
    DenseCase("odd_sizes", 9, n=7, k=13),
    DenseCase("one_row", 1, n=5, k=3),
    DenseCase("one_feature", 21, n=1, k=1),
    DenseCase("zero_rows", 0, n=7, k=13),
    DenseCase("no_features", 6, n=7, k=0),
    DenseCase("experts", 20, n=24, k=8, experts=3),
    DenseCase("experts_without_rows", 0, n=7, k=13, experts=2),
    DenseCase("one_expert", 5, n=1, k=3, experts=1),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.name)
def test_matches_float64(case: DenseCase, dtype: torch.dtype, out_dtype: torch.dtype, layout: str, device: str) -> None:
    dy, x = case.operands(dtype, device, layout)
    expected = dy.double().mT @ x.double()
    if device == "cuda":
        poison_allocator((tuple(expected.shape), out_dtype))
    dw = dense_wgrad(dy, x, out_dtype=out_dtype)
    assert dw.dtype == out_dtype and dw.shape == expected.shape and dw.is_contiguous()
    bound = FLOAT32_BOUND[device] if out_dtype == torch.float32 else error_bound(expected, out_dtype, device)
    assert relative_error(dw, expected) <= bound


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_output_misses_the_float32_bound(device: str) -> None:
    dy, x = DenseCase("", 200, n=24, k=40).operands(torch.bfloat16, device)
    expected = dy.double().t() @ x.double()
    rounded = dense_wgrad(dy, x)
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, expected) > 1e-3
    assert relative_error(dense_wgrad(dy, x, out_dtype=torch.float32), expected) < 1e-4


def call(**changed: object) -> Tensor:
    arguments = {"dy": torch.zeros(8, 3, dtype=torch.bfloat16), "x": torch.zeros(8, 5, dtype=torch.bfloat16)}
    return dense_wgrad(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("rows", lambda: call(x=torch.zeros(9, 5).bfloat16()), ValueError, ("dy and x", "8 and 9")),
    BadCall("mixed_dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("x", "bfloat16", "float32", "cast")),
    BadCall("x_ndim", lambda: call(x=torch.zeros(2, 4, 5).bfloat16()), ValueError, ("x", "2 dimensions", "got 3")),
    BadCall(
        "experts",
        lambda: call(dy=torch.zeros(2, 8, 3).bfloat16(), x=torch.zeros(3, 8, 5).bfloat16()),
        ValueError,
        ("dy and x", "E, the number of experts", "2 and 3"),
    ),
    BadCall(
        "rows_of_experts",
        lambda: call(dy=torch.zeros(2, 8, 3).bfloat16(), x=torch.zeros(2, 9, 5).bfloat16()),
        ValueError,
        ("dy and x", "R, the number of rows", "8 and 9"),
    ),
    BadCall("float64", lambda: call(dy=torch.zeros(8, 3, dtype=torch.float64)), TypeError, ("dy", "float64", "cast")),
    BadCall("out_dtype", lambda: call(out_dtype=torch.float64), TypeError, ("out_dtype", "float32", "float64")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=shape_env)
    dy = mode.from_tensor(torch.zeros(8, 3), symbolic_context=dynamic)
    with mode:
        unbacked = torch.empty(shape_env.create_unbacked_symint(), 5)
        before = count_guards(shape_env)
        dw = torch.ops.gtp.dense_wgrad(dy, unbacked, torch.float32)
    assert dw.shape[0].node.expr == dy.shape[1].node.expr and dw.shape[1] == 5
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", (*DENSE_CASES[:2], DENSE_CASES[6]), ids=lambda case: case.name)
def test_opcheck(case: DenseCase, device: str) -> None:
    dy, x = (tensor.requires_grad_() for tensor in case.operands(torch.bfloat16, device))
    torch.library.opcheck(torch.ops.gtp.dense_wgrad.default, (dy, x, torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", (DENSE_CASES[0], DENSE_CASES[6]), ids=lambda case: case.name)
def test_differentiates_in_both_operands(case: DenseCase, device: str) -> None:
    dy, x = (tensor.requires_grad_() for tensor in case.operands(torch.float32, device))
    dy64, x64 = (tensor.detach().double().requires_grad_() for tensor in (dy, x))
    dw = dense_wgrad(dy, x)
    cotangent = torch.randn(dw.shape, device=device)
    grads = torch.autograd.grad(dw, (dy, x), cotangent)
    expected = torch.autograd.grad(dy64.mT @ x64, (dy64, x64), cotangent.double())
    for grad, truth in zip(grads, expected, strict=True):
        assert relative_error(grad, truth) <= FLOAT32_BOUND[device]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_row_counts(backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(dense_wgrad, backend=backend, fullgraph=True)
    for index, rows in enumerate((16, 41, 3)):
        dy, x = (tensor.requires_grad_() for tensor in DenseCase("", rows, n=8, k=12).operands(torch.float32, device))
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(x, 0)
        cotangent = torch.ones(8, 12, device=device)
        if index == 0:
            torch.autograd.grad(compiled(dy, x, out_dtype=torch.float32), (dy, x), cotangent)
        with no_recompiles():
            dw = compiled(dy, x, out_dtype=torch.float32)
            grads = torch.autograd.grad(dw, (dy, x), cotangent)
        eager = dense_wgrad(dy, x, out_dtype=torch.float32)
        assert torch.equal(dw, eager)
        for actual, expected in zip(grads, torch.autograd.grad(eager, (dy, x), cotangent), strict=True):
            assert relative_error(actual, expected) <= FLOAT32_BOUND[device]


class TestOnGpu:
    pytestmark = GPU_MARKS

    @pytest.mark.parametrize("out_dtype", DTYPES, ids=dtype_id)
    def test_repeats_bit_by_bit(self, out_dtype: torch.dtype) -> None:
        dy, x = DenseCase("", 1025, n=520, k=264).operands(torch.bfloat16, "cuda")
        first = dense_wgrad(dy, x, out_dtype=out_dtype)
        for _ in range(5):
            assert torch.equal(dense_wgrad(dy, x, out_dtype=out_dtype), first)

    def test_does_not_synchronize(self) -> None:
        dy, x = DenseCase("", 256, n=128, k=64).operands(torch.bfloat16, "cuda")
        dense_wgrad(dy, x, out_dtype=torch.float32)
        torch.cuda.set_sync_debug_mode("error")
        try:
            dense_wgrad(dy, x, out_dtype=torch.float32)
        finally:
            torch.cuda.set_sync_debug_mode("default")
