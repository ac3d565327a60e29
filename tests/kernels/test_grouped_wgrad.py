import pytest
import torch
from kernel_testing import (
    CASES,
    DEVICES,
    DTYPES,
    FLOAT32_BOUND,
    GPU_MARKS,
    LAYOUTS,
    RAGGED,
    BadCall,
    Case,
    assert_refused,
    case_id,
    count_guards,
    dtype_id,
    error_bound,
    no_recompiles,
    operands,
    poison_allocator,
    relative_error,
    skip_without_memory,
    wgrad_float64,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import grouped_wgrad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_float64(case: Case, dtype: torch.dtype, layout: str, device: str) -> None:
    dy, x = operands(case, dtype, device, layout)
    expected = wgrad_float64(dy, x, case.slices)
    for out_dtype in {dtype, torch.float32}:
        if device == "cuda":
            poison_allocator((tuple(expected.shape), out_dtype))
        dw = grouped_wgrad(dy, x, case.offs(device), out_dtype=out_dtype)
        assert dw.dtype == out_dtype and dw.shape == expected.shape and dw.is_contiguous()
        bound = FLOAT32_BOUND[device] if out_dtype == torch.float32 else error_bound(expected, out_dtype, device)
        assert relative_error(dw, expected) <= bound
        for expert, count in enumerate(case.counts):
            assert count or not dw[expert].any(), "an empty expert must be exactly zero"


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_output_misses_the_float32_bound(device: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, device)
    expected = wgrad_float64(dy, x, RAGGED.slices)
    rounded = grouped_wgrad(dy, x, RAGGED.offs(device))
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, expected) > 1e-3
    assert relative_error(grouped_wgrad(dy, x, RAGGED.offs(device), out_dtype=torch.float32), expected) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_float32_output_keeps_what_bf16_would_round_away(device: str) -> None:
    dy = torch.ones(2, 1, dtype=torch.bfloat16, device=device)
    x = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16, device=device)
    offs = torch.tensor([2], dtype=torch.int32, device=device)
    assert grouped_wgrad(dy, x, offs, out_dtype=torch.float32).item() == 257
    assert grouped_wgrad(dy, x, offs).item() == 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_nan_stays_in_its_expert(dtype: torch.dtype, device: str) -> None:
    dy, x = operands(RAGGED, dtype, device)
    clean = grouped_wgrad(dy, x, RAGGED.offs(device), out_dtype=torch.float32)
    dy[RAGGED.slices[3]] = torch.nan
    x[RAGGED.slices[3]] = torch.inf
    dirty = grouped_wgrad(dy, x, RAGGED.offs(device), out_dtype=torch.float32)
    others = [0, 1, 2, 4, 5]
    assert dirty[3].isnan().all()
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("device", DEVICES)
def test_offs_may_be_strided(device: str) -> None:
    dy, x = operands(RAGGED, torch.float32, device)
    offs = RAGGED.offs(device)
    strided = torch.stack([offs, torch.full_like(offs, -1)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(grouped_wgrad(dy, x, strided), grouped_wgrad(dy, x, offs))


def call(rows: int = 8, x_rows: int = 8, dtype: torch.dtype = torch.bfloat16, **changed: object) -> Tensor:
    arguments = {
        "dy": torch.zeros(rows, 3, dtype=torch.bfloat16),
        "x": torch.zeros(x_rows, 5, dtype=dtype),
        "offs": torch.zeros(2, dtype=torch.int32),
    }
    return grouped_wgrad(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("rows", lambda: call(x_rows=9), ValueError, ("dy and x", "8 and 9")),
    BadCall("mixed_dtypes", lambda: call(dtype=torch.float32), TypeError, ("x", "bfloat16", "float32", "cast")),
    BadCall("integers", lambda: call(dy=torch.zeros(8, 3, dtype=torch.int32)), TypeError, ("dy", "int32", "cast")),
    BadCall("dy_ndim", lambda: call(dy=torch.zeros(2, 8, 3)), ValueError, ("dy", "2 dimensions", "got 3")),
    BadCall("int64_offs", lambda: call(offs=torch.zeros(2, dtype=torch.int64)), TypeError, ("offs", "int32", "int64")),
    BadCall("offs_ndim", lambda: call(offs=torch.zeros(2, 1, dtype=torch.int32)), ValueError, ("offs", "got 2")),
    BadCall("out_dtype", lambda: call(out_dtype=torch.int8), TypeError, ("out_dtype", "float32", "int8")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


@pytest.mark.parametrize("offs", [[5, 3], [4, 9], [-1, 4]], ids=["falling", "past_the_rows", "negative"])
def test_refuses_wrong_offsets_on_cpu(offs: list[int]) -> None:
    with pytest.raises(ValueError, match=r"offs must rise .* 8, .*cumsum"):
        call(offs=torch.tensor(offs, dtype=torch.int32))


def test_refuses_another_device() -> None:
    with pytest.raises(ValueError, match=r"offs must be on the device of dy, meta, got cpu"), torch.device("meta"):
        call(offs=torch.zeros(2, dtype=torch.int32, device="cpu"))


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=shape_env)
    dy = mode.from_tensor(torch.zeros(8, 3), symbolic_context=dynamic)
    x = mode.from_tensor(torch.zeros(8, 5), symbolic_context=dynamic)
    with mode:
        unbacked = torch.empty(shape_env.create_unbacked_symint(), 5)
        offs = torch.empty(shape_env.create_unbacked_symint(), dtype=torch.int32)
        before = count_guards(shape_env)
        dw = torch.ops.gtp.grouped_wgrad(dy, x, offs, torch.bfloat16)
        torch.ops.gtp.grouped_wgrad(dy, unbacked, offs, torch.bfloat16)
    assert dw.shape[0].node.expr == offs.shape[0].node.expr
    assert dw.shape[1].node.expr == dy.shape[1].node.expr
    assert dw.dtype == torch.bfloat16
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [RAGGED, CASES[3]], ids=case_id)
def test_opcheck(case: Case, device: str) -> None:
    dy, x = (tensor.nan_to_num().requires_grad_() for tensor in operands(case, torch.bfloat16, device))
    torch.library.opcheck(torch.ops.gtp.grouped_wgrad.default, (dy, x, case.offs(device), torch.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_differentiates_in_both_operands(device: str) -> None:
    dy, x = (tensor.requires_grad_() for tensor in operands(RAGGED, torch.float32, device))
    dy64, x64 = (tensor.detach().double().requires_grad_() for tensor in (dy, x))
    cotangent = torch.randn(len(RAGGED.counts), RAGGED.n, RAGGED.k, device=device)
    grads = torch.autograd.grad(grouped_wgrad(dy, x, RAGGED.offs(device)), (dy, x), cotangent)
    expected = torch.autograd.grad(wgrad_float64(dy64, x64, RAGGED.slices), (dy64, x64), cotangent.double())
    for grad, truth in zip(grads, expected, strict=True):
        assert relative_error(grad, truth) <= FLOAT32_BOUND[device]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_row_counts(backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(grouped_wgrad, backend=backend, fullgraph=True)
    cases = [Case("", counts, n=8, k=12) for counts in ((7, 0, 9), (40, 1, 0), (0, 0, 3))]
    for index, case in enumerate(cases):
        dy, x = operands(case, torch.bfloat16, device)
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(x, 0)
        arguments = (dy, x, case.offs(device))
        if index == 0:
            compiled(*arguments, out_dtype=torch.float32)
        with no_recompiles():
            dw = compiled(*arguments, out_dtype=torch.float32)
        assert torch.equal(dw, grouped_wgrad(*arguments, out_dtype=torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_zero_rows(backend: str, device: str) -> None:
    torch.compiler.reset()
    dy, x = torch.zeros(0, 224, device=device), torch.zeros(0, 256, device=device)
    offs = torch.zeros(4, dtype=torch.int32, device=device)
    dw = torch.compile(grouped_wgrad, backend=backend, fullgraph=True)(dy, x, offs)
    assert dw.shape == (4, 224, 256) and not dw.any()


class TestOnGpu:
    pytestmark = GPU_MARKS

    def test_reported_splits_at_full_size(self) -> None:
        case = Case("", (162, 0, 2577, 446, 0, 83), n=768, k=2048, tail=500)
        dy, x = operands(case, torch.bfloat16, "cuda")
        poison_allocator(((6, case.n, case.k), torch.float32))
        dw = grouped_wgrad(dy, x, case.offs("cuda"), out_dtype=torch.float32)
        assert not dw[1].any() and not dw[4].any()
        assert relative_error(dw, wgrad_float64(dy, x, case.slices)) <= FLOAT32_BOUND["cuda"]

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
    def test_repeats_bit_by_bit(self, dtype: torch.dtype) -> None:
        case = Case("", (300, 0, 1025, 77, 2), n=520, k=264, tail=31)
        dy, x = operands(case, dtype, "cuda")
        first = grouped_wgrad(dy, x, case.offs("cuda"), out_dtype=torch.float32)
        for _ in range(5):
            assert torch.equal(grouped_wgrad(dy, x, case.offs("cuda"), out_dtype=torch.float32), first)

    def test_does_not_synchronize(self) -> None:
        dy, x = operands(RAGGED, torch.bfloat16, "cuda")
        offs = RAGGED.offs("cuda")
        grouped_wgrad(dy, x, offs, out_dtype=torch.float32)  # compile first: loading a module may synchronize
        torch.cuda.set_sync_debug_mode("error")
        try:
            grouped_wgrad(dy, x, offs, out_dtype=torch.float32)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_replays_in_a_cuda_graph_with_other_offsets(self) -> None:
        dy, x = (tensor.nan_to_num() for tensor in operands(RAGGED, torch.bfloat16, "cuda"))
        offs = RAGGED.offs("cuda")
        grouped_wgrad(dy, x, offs, out_dtype=torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dw = grouped_wgrad(dy, x, offs, out_dtype=torch.float32)
        other = Case("", (0, 90, 3, 0, 101, 7), n=RAGGED.n, k=RAGGED.k)
        offs.copy_(other.offs("cuda"))
        graph.replay()
        assert relative_error(dw, wgrad_float64(dy, x, other.slices)) <= FLOAT32_BOUND["cuda"]

    @pytest.mark.parametrize("layout", ["row_major", "column_major"])
    def test_addresses_rows_past_2_31(self, layout: str) -> None:
        skip_without_memory(16)
        rows, n, k, live = 1 << 21, 1032, 8, 300
        assert rows * n > 2**31
        shape = (rows, n) if layout == "row_major" else (n, rows)
        dy = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        dy = dy if layout == "row_major" else dy.t()
        dy[-live:] = torch.randn(live, n, device="cuda").bfloat16()
        x = torch.randn(rows, k, device="cuda").bfloat16()
        offs = torch.tensor([rows - live, rows], dtype=torch.int32, device="cuda")
        dw = grouped_wgrad(dy, x, offs, out_dtype=torch.float32)
        expected = dy[-live:].double().t() @ x[-live:].double()
        assert not dw[0].any()
        assert relative_error(dw[1], expected) <= FLOAT32_BOUND["cuda"]

    def test_addresses_output_past_2_31(self) -> None:
        skip_without_memory(24)
        experts, n, k = 40, 8192, 8192
        assert experts * n * k > 2**31
        dy, x = (torch.randn(experts, size, device="cuda").bfloat16() for size in (n, k))
        dw = grouped_wgrad(dy, x, torch.arange(1, experts + 1, dtype=torch.int32, device="cuda"))
        for expert in (0, experts - 1):
            assert torch.equal(dw[expert], (dy[expert].float()[:, None] * x[expert].float()).bfloat16())
