import pytest
import torch
from kernel_testing import (
    CASES,
    DEVICES,
    DTYPES,
    FLOAT32_BOUND,
    LAYOUTS,
    RAGGED,
    BadCall,
    Case,
    assert_refused,
    case_id,
    count_guards,
    dtype_id,
    no_recompiles,
    operands,
    relative_error,
    same_bits,
    wgrad_float64,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import grouped_wgrad, grouped_wgrad_add_


def old_grads(case: Case, device: str = "cpu") -> Tensor:
    """Noise, and for experts without rows values that an addition of zero would change."""
    old = torch.randn(len(case.counts), case.n, case.k, generator=torch.Generator().manual_seed(3)).to(device)
    for expert, count in enumerate(case.counts):
        if count == 0:
            old[expert] = -0.0
    return old


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_adds_the_gradient(case: Case, dtype: torch.dtype, layout: str, device: str) -> None:
    dy, x = operands(case, dtype, device, layout)
    old = old_grads(case, device)
    main_grad = old.clone()
    grouped_wgrad_add_(main_grad, dy, x, case.offs(device))
    expected = old.double() + wgrad_float64(dy, x, case.slices)
    assert relative_error(main_grad, expected) <= FLOAT32_BOUND[device]
    for expert, count in enumerate(case.counts):
        assert count or same_bits(main_grad[expert], old[expert]), "an expert without rows must stay untouched"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_is_the_old_value_plus_the_fresh_gradient(dtype: torch.dtype, device: str) -> None:
    dy, x = operands(RAGGED, dtype, device)
    old = old_grads(RAGGED, device)
    main_grad = old.clone()
    grouped_wgrad_add_(main_grad, dy, x, RAGGED.offs(device))
    fresh = grouped_wgrad(dy, x, RAGGED.offs(device), out_dtype=torch.float32)
    filled = torch.tensor(RAGGED.counts, device=device)[:, None, None] > 0
    assert same_bits(main_grad, torch.where(filled, old + fresh, old))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "window"])
def test_main_grad_may_be_strided(layout: str, device: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, device)
    plain = old_grads(RAGGED, device)
    if layout == "transposed":
        strided = plain.mT.contiguous().mT
    else:
        buffer = torch.full((len(RAGGED.counts) + 1, RAGGED.n + 3, RAGGED.k + 8), 7.0, device=device)
        strided = buffer[1:, 3:, 4:-4].copy_(plain)
    grouped_wgrad_add_(strided, dy, x, RAGGED.offs(device))
    if layout == "window":
        around = buffer.clone()
        around[1:, 3:, 4:-4] = 7.0
        assert (around == 7.0).all()
    expected = plain.double() + wgrad_float64(dy, x, RAGGED.slices)
    assert relative_error(strided, expected) <= FLOAT32_BOUND[device]


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_operands_add_the_transposed_gradient(device: str) -> None:
    dy, x = operands(RAGGED, torch.bfloat16, device)
    main_grad = torch.zeros(len(RAGGED.counts), RAGGED.k, RAGGED.n, device=device)
    grouped_wgrad_add_(main_grad, x, dy, RAGGED.offs(device))
    assert relative_error(main_grad.mT, wgrad_float64(dy, x, RAGGED.slices)) <= FLOAT32_BOUND[device]


def call(**changed: object) -> None:
    arguments = {
        "main_grad": torch.zeros(2, 3, 5),
        "dy": torch.zeros(8, 3, dtype=torch.bfloat16),
        "x": torch.zeros(8, 5, dtype=torch.bfloat16),
        "offs": torch.zeros(2, dtype=torch.int32),
    }
    grouped_wgrad_add_(**{**arguments, **changed})  # type: ignore[arg-type]


BAD_CALLS = (
    BadCall("main_grad_dtype", lambda: call(main_grad=torch.zeros(2, 3, 5).bfloat16()), TypeError, ("main_grad",)),
    BadCall("main_grad_ndim", lambda: call(main_grad=torch.zeros(6, 5)), ValueError, ("main_grad", "[E, N, K]")),
    BadCall("experts", lambda: call(main_grad=torch.zeros(3, 3, 5)), ValueError, ("main_grad and offs", "3 and 2")),
    BadCall("n", lambda: call(main_grad=torch.zeros(2, 4, 5)), ValueError, ("main_grad and dy", "4 and 3")),
    BadCall("k", lambda: call(main_grad=torch.zeros(2, 3, 6)), ValueError, ("main_grad and x", "6 and 5")),
    BadCall("rows", lambda: call(x=torch.zeros(9, 5).bfloat16()), ValueError, ("dy and x", "8 and 9")),
    BadCall("mixed_dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("x", "bfloat16", "float32")),
    BadCall("int64_offs", lambda: call(offs=torch.zeros(2, dtype=torch.int64)), TypeError, ("offs", "int32")),
)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refuses(bad: BadCall, where: str) -> None:
    assert_refused(bad, where)


@pytest.mark.parametrize("offs", [[5, 3], [4, 9], [-1, 4]], ids=["falling", "past_the_rows", "negative"])
def test_refuses_wrong_offsets_on_cpu(offs: list[int]) -> None:
    with pytest.raises(ValueError, match=r"grouped_wgrad_add_: offs must rise .* 8, .*cumsum"):
        call(offs=torch.tensor(offs, dtype=torch.int32))


def test_fake_adds_no_guard() -> None:
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=shape_env)
    dy = mode.from_tensor(torch.zeros(8, 3), symbolic_context=dynamic)
    with mode:
        x = torch.empty(shape_env.create_unbacked_symint(), 5)
        offs = torch.empty(shape_env.create_unbacked_symint(), dtype=torch.int32)
        before = count_guards(shape_env)
        torch.ops.gtp.grouped_wgrad_add_(torch.empty(2, 3, 5), dy, x, offs)
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [RAGGED, CASES[3]], ids=case_id)
def test_opcheck(case: Case, device: str) -> None:
    dy, x = (tensor.nan_to_num() for tensor in operands(case, torch.bfloat16, device))
    arguments = (old_grads(case, device), dy, x, case.offs(device))
    torch.library.opcheck(torch.ops.gtp.grouped_wgrad_add_.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_row_counts(backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(grouped_wgrad_add_, backend=backend, fullgraph=True)
    cases = [Case("", counts, n=8, k=12) for counts in ((7, 0, 9), (40, 1, 0), (0, 0, 3))]
    for index, case in enumerate(cases):
        dy, x = operands(case, torch.bfloat16, device)
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(x, 0)
        main_grad = old_grads(case, device)
        expected = main_grad.clone()
        if index == 0:
            compiled(main_grad.clone(), dy, x, case.offs(device))
        with no_recompiles():
            compiled(main_grad, dy, x, case.offs(device))
        grouped_wgrad_add_(expected, dy, x, case.offs(device))
        assert same_bits(main_grad, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_rows_change_nothing(device: str) -> None:
    main_grad = torch.full((4, 224, 256), -0.0, device=device)
    dy, x = torch.zeros(0, 224, device=device).bfloat16(), torch.zeros(0, 256, device=device).bfloat16()
    grouped_wgrad_add_(main_grad, dy, x, torch.zeros(4, dtype=torch.int32, device=device))
    assert same_bits(main_grad, torch.full_like(main_grad, -0.0))
