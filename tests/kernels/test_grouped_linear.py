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
    OpCounter,
    assert_refused,
    case_id,
    count_guards,
    dtype_id,
    error_bound,
    linear_float64,
    no_recompiles,
    poison_allocator,
    relative_error,
    skip_without_memory,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import grouped_linear


def operands(case: Case, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    x = case.matrix(case.k, dtype, device, layout=layout, seed=1)
    weight = torch.randn(len(case.counts), case.n, case.k, generator=torch.Generator().manual_seed(2))
    weight = weight.to(device, dtype)
    match layout:
        case "transposed":
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        case "gapped":
            padded = weight.new_full((2 * len(case.counts), case.n + 1, 2 * case.k + 1), torch.nan)
            weight = padded[::2, 1:, 1::2].copy_(weight)
        case "expanded":
            weight = weight[:, :1].expand(-1, case.n, -1)
    return x, weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_float64(case: Case, dtype: torch.dtype, layout: str, device: str) -> None:
    x, weight = operands(case, dtype, device, layout)
    expected = linear_float64(x, weight, case.slices)
    if device == "cuda":
        poison_allocator((tuple(expected.shape), dtype))
    y = grouped_linear(x, weight, case.offs(device))
    assert y.dtype == dtype and y.shape == expected.shape and y.is_contiguous()
    assert relative_error(y, expected) <= error_bound(expected, dtype, device)
    assert not y[sum(case.counts) :].any(), "rows past the last offset must be exactly zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", [case for case in CASES if case.counts], ids=case_id)
def test_gradients_match_float64(case: Case, dtype: torch.dtype, device: str) -> None:
    x, weight = (tensor.requires_grad_() for tensor in operands(case, dtype, device))
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    dy = case.matrix(case.n, dtype, device, layout="transposed", seed=3)
    expected = torch.autograd.grad(linear_float64(x64, weight64, case.slices), (x64, weight64), dy.double())
    for _ in range(2):
        if device == "cuda":
            poison_allocator((tuple(x.shape), dtype), (tuple(weight.shape), dtype))
        dx, dweight = torch.autograd.grad(grouped_linear(x, weight, case.offs(device)), (x, weight), dy)
        assert dx.dtype == dweight.dtype == dtype
        assert relative_error(dx, expected[0].nan_to_num()) <= error_bound(expected[0].nan_to_num(), dtype, device)
        assert relative_error(dweight, expected[1]) <= error_bound(expected[1], dtype, device)
        assert not dx[sum(case.counts) :].any(), "rows past the last offset must have a gradient of exactly zero"
        assert all(count or not dweight[expert].any() for expert, count in enumerate(case.counts))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_experts(device: str) -> None:
    x = torch.full((5, 4), torch.nan, device=device, requires_grad=True)
    weight = torch.zeros(0, 6, 4, device=device, requires_grad=True)
    y = grouped_linear(x, weight, torch.zeros(0, dtype=torch.int32, device=device))
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert not dx.any() and dweight.shape == weight.shape


@pytest.mark.parametrize("device", DEVICES)
def test_takes_the_expanded_gradient_of_a_sum(device: str) -> None:
    x, weight = (tensor.requires_grad_() for tensor in operands(RAGGED, torch.float32, device))
    grouped_linear(x, weight, RAGGED.offs(device)).sum().backward()
    for expert, routed in enumerate(RAGGED.slices):
        column_sum = x.detach()[routed].double().sum(0).expand(RAGGED.n, RAGGED.k)
        assert relative_error(weight.grad[expert], column_sum) <= FLOAT32_BOUND[device]


@pytest.mark.parametrize(
    ("needs_x", "needs_weight", "backward_ops"),
    [
        (True, True, ["gtp::grouped_linear", "gtp::grouped_wgrad"]),
        (True, False, ["gtp::grouped_linear"]),
        (False, True, ["gtp::grouped_wgrad"]),
    ],
)
def test_computes_only_the_gradients_needed(needs_x: bool, needs_weight: bool, backward_ops: list[str]) -> None:
    x, weight = operands(RAGGED, torch.bfloat16)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = grouped_linear(x.requires_grad_(needs_x), weight.requires_grad_(needs_weight), RAGGED.offs())
    assert (x.data_ptr() in saved) == needs_weight
    assert (weight.data_ptr() in saved) == needs_x
    with OpCounter() as counter:
        y.backward(torch.ones_like(y))
    assert counter.names == backward_ops
    assert (x.grad is not None) == needs_x and (weight.grad is not None) == needs_weight


def test_gradients_can_be_differentiated() -> None:
    x, weight = (tensor.requires_grad_() for tensor in operands(RAGGED, torch.float32))
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))

    def penalty(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        routed = sum(RAGGED.counts)
        dx, dweight = torch.autograd.grad(y[:routed].square().sum(), (x, weight), create_graph=True)
        return dx[:routed].square().sum() + dweight.square().sum()

    y, y64 = grouped_linear(x, weight, RAGGED.offs()), linear_float64(x64, weight64, RAGGED.slices)
    grads = torch.autograd.grad(penalty(x, weight, y), (x, weight))
    expected = torch.autograd.grad(penalty(x64, weight64, y64), (x64, weight64))
    routed = sum(RAGGED.counts)
    assert relative_error(grads[0][:routed], expected[0][:routed]) <= 2 * FLOAT32_BOUND["cpu"]
    assert relative_error(grads[1], expected[1]) <= 2 * FLOAT32_BOUND["cpu"]


def call(experts: int = 3, offsets: int = 3, k: int = 5, weight_k: int = 5, **changed: object) -> Tensor:
    arguments = {
        "x": torch.zeros(8, k, dtype=torch.bfloat16),
        "weight": torch.zeros(experts, 4, weight_k, dtype=torch.bfloat16),
        "offs": torch.zeros(offsets, dtype=torch.int32),
    }
    return grouped_linear(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("experts", lambda: call(offsets=4), ValueError, ("offs and weight", "experts", "4 and 3")),
    BadCall("features", lambda: call(weight_k=6), ValueError, ("x and weight", "in features", "5 and 6")),
    BadCall("mixed_dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("weight", "float32", "bfloat16", "cast")),
    BadCall("weight_ndim", lambda: call(weight=torch.zeros(4, 5).bfloat16()), ValueError, ("weight", "[E, N, K]")),
    BadCall("int64_offs", lambda: call(offs=torch.zeros(3, dtype=torch.int64)), TypeError, ("offs", "int32", "int64")),
    BadCall("offs_ndim", lambda: call(offs=torch.zeros(3, 1, dtype=torch.int32)), ValueError, ("offs", "got 2")),
    BadCall("float64", lambda: call(x=torch.zeros(8, 5, dtype=torch.float64)), TypeError, ("x", "float64", "cast")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


def test_refuses_wrong_offsets_on_cpu() -> None:
    with pytest.raises(ValueError, match=r"offs must rise .* 8, got 2 -> 9 at expert 2"):
        call(offs=torch.tensor([1, 2, 9], dtype=torch.int32))


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=shape_env)
    x = mode.from_tensor(torch.zeros(8, 5), symbolic_context=dynamic)
    with mode:
        unbacked = torch.empty(shape_env.create_unbacked_symint(), 5)
        weight, offs = torch.empty(3, 4, 5), torch.empty(3, dtype=torch.int32)
        before = count_guards(shape_env)
        y = torch.ops.gtp.grouped_linear(x, weight, offs)
        torch.ops.gtp.grouped_linear(unbacked, weight, offs)
    assert y.shape[0].node.expr == x.shape[0].node.expr and y.shape[1] == 4
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [RAGGED, CASES[3]], ids=case_id)
def test_opcheck(case: Case, device: str) -> None:
    x, weight = (tensor.nan_to_num().requires_grad_() for tensor in operands(case, torch.bfloat16, device))
    torch.library.opcheck(torch.ops.gtp.grouped_linear.default, (x, weight, case.offs(device)))


def forward_backward(x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = grouped_linear(x, weight, offs)
    return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_row_counts(backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(grouped_linear, backend=backend, fullgraph=True)
    cases = [Case("", counts, n=8, k=12, tail=2) for counts in ((7, 0, 9), (40, 1, 0), (0, 0, 3))]
    for index, case in enumerate(cases):
        x, weight = (tensor.requires_grad_() for tensor in operands(case, torch.bfloat16, device))
        torch._dynamo.mark_dynamic(x, 0)
        dy = torch.ones(case.rows, case.n, dtype=torch.bfloat16, device=device)
        if index == 0:
            torch.autograd.grad(compiled(x, weight, case.offs(device)), (x, weight), dy)
        with no_recompiles():
            y = compiled(x, weight, case.offs(device))
            grads = torch.autograd.grad(y, (x, weight), dy)
        for actual, expected in zip((y, *grads), forward_backward(x, weight, case.offs(device)), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_zero_rows(backend: str, device: str) -> None:
    torch.compiler.reset()
    x = torch.zeros(0, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(4, 224, 256, device=device).bfloat16().requires_grad_()
    offs = torch.zeros(4, dtype=torch.int32, device=device)
    y = torch.compile(grouped_linear, backend=backend, fullgraph=True)(x, weight, offs)
    y.backward(torch.empty_like(y))
    assert y.shape == (0, 224) and x.grad.shape == (0, 256)
    assert weight.grad.shape == weight.shape and not weight.grad.any()


class TestOnGpu:
    pytestmark = GPU_MARKS

    def test_reported_splits_at_full_size(self) -> None:
        case = Case("", (162, 0, 2577, 446, 0, 83), n=768, k=2048, tail=500)
        x, weight = operands(case, torch.bfloat16, "cuda")
        poison_allocator(((case.rows, case.n), torch.bfloat16))
        y = grouped_linear(x, weight, case.offs("cuda"))
        expected = linear_float64(x, weight, case.slices)
        assert relative_error(y, expected) <= error_bound(expected, torch.bfloat16, "cuda")
        assert not y[sum(case.counts) :].any()

    def test_many_experts(self) -> None:
        counts = tuple(37 * expert % 11 for expert in range(300))
        case = Case("", counts, n=72, k=56, tail=200)
        x, weight = operands(case, torch.bfloat16, "cuda")
        expected = linear_float64(x, weight, case.slices)
        y = grouped_linear(x, weight, case.offs("cuda"))
        assert relative_error(y, expected) <= error_bound(expected, torch.bfloat16, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
    def test_repeats_bit_by_bit(self, dtype: torch.dtype) -> None:
        case = Case("", (300, 0, 1025, 77, 2), n=520, k=264, tail=31)
        x, weight = operands(case, dtype, "cuda")
        first = grouped_linear(x, weight, case.offs("cuda"))
        for _ in range(5):
            assert torch.equal(grouped_linear(x, weight, case.offs("cuda")), first)

    def test_does_not_synchronize(self) -> None:
        x, weight = (tensor.requires_grad_() for tensor in operands(RAGGED, torch.bfloat16, "cuda"))
        offs = RAGGED.offs("cuda")
        forward_backward(x, weight, offs)  # compile first: loading a module may synchronize
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward_backward(x, weight, offs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_addresses_rows_past_2_31(self) -> None:
        skip_without_memory(16)
        rows, wide, narrow, live = 1 << 21, 1032, 8, 300
        assert rows * wide > 2**31
        x = torch.zeros(rows, wide, dtype=torch.bfloat16, device="cuda")
        x[-live:] = torch.randn(live, wide, device="cuda").bfloat16()
        weight = torch.randn(2, narrow, wide, device="cuda").bfloat16()
        offs = torch.tensor([rows - live, rows], dtype=torch.int32, device="cuda")
        y = grouped_linear(x, weight, offs)
        expected = x[-live:].double() @ weight[1].double().t()
        assert not y[:-live].any()
        assert relative_error(y[-live:], expected) <= error_bound(expected, torch.bfloat16, "cuda")
        # The transposed weight makes the output, not the input, pass 2^31.
        wide_y = grouped_linear(y, weight.transpose(1, 2), offs)
        expected = y[-live:].double() @ weight[1].double()
        assert relative_error(wide_y[-live:], expected) <= error_bound(expected, torch.bfloat16, "cuda")
        assert not wide_y[:-live].any()
