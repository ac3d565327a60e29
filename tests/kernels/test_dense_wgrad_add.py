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
    no_recompiles,
    relative_error,
    same_bits,
)
from test_dense_wgrad import DENSE_CASES, DenseCase
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gtp_compile.kernels import dense_wgrad, dense_wgrad_add_


def old_grads(case: DenseCase, device: str = "cpu") -> Tensor:
    shape = (case.experts, case.n, case.k) if case.experts else (case.n, case.k)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.name)
def test_adds_the_gradient(case: DenseCase, dtype: torch.dtype, layout: str, device: str) -> None:
    dy, x = case.operands(dtype, device, layout)
    old = old_grads(case, device)
    main_grad = old.clone()
    dense_wgrad_add_(main_grad, dy, x)
    assert relative_error(main_grad, old.double() + dy.double().mT @ x.double()) <= FLOAT32_BOUND[device]
    assert case.rows or same_bits(main_grad, old)


def test_on_cpu_it_is_the_old_value_plus_the_fresh_gradient() -> None:
    dy, x = DENSE_CASES[0].operands(torch.bfloat16)
    main_grad = old_grads(DENSE_CASES[0])
    expected = main_grad + dense_wgrad(dy, x, out_dtype=torch.float32)
    dense_wgrad_add_(main_grad, dy, x)
    assert same_bits(main_grad, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "window"])
@pytest.mark.parametrize("case", (DENSE_CASES[0], DENSE_CASES[6]), ids=lambda case: case.name)
def test_main_grad_may_be_strided(case: DenseCase, layout: str, device: str) -> None:
    dy, x = case.operands(torch.bfloat16, device)
    plain = old_grads(case, device)
    if layout == "transposed":
        strided = plain.mT.contiguous().mT
    else:
        buffer = torch.full((*plain.shape[:-2], case.n + 3, case.k + 8), 7.0, device=device)
        strided = buffer[..., 3:, 4:-4].copy_(plain)
    dense_wgrad_add_(strided, dy, x)
    assert relative_error(strided, plain.double() + dy.double().mT @ x.double()) <= FLOAT32_BOUND[device]
    if layout == "window":
        buffer[..., 3:, 4:-4] = 7.0
        assert (buffer == 7.0).all()


def call(**changed: object) -> None:
    arguments = {
        "main_grad": torch.zeros(3, 5),
        "dy": torch.zeros(8, 3, dtype=torch.bfloat16),
        "x": torch.zeros(8, 5, dtype=torch.bfloat16),
    }
    dense_wgrad_add_(**{**arguments, **changed})  # type: ignore[arg-type]


def stack(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


BAD_CALLS = (
    BadCall("main_grad_dtype", lambda: call(main_grad=stack(3, 5)), TypeError, ("main_grad",)),
    BadCall("main_grad_ndim", lambda: call(main_grad=torch.zeros(1, 3, 5)), ValueError, ("main_grad", "[N, K]")),
    BadCall(
        "experts",
        lambda: call(main_grad=torch.zeros(3, 3, 5), dy=stack(2, 8, 3), x=stack(2, 8, 5)),
        ValueError,
        ("main_grad and dy", "3 and 2"),
    ),
    BadCall("n", lambda: call(main_grad=torch.zeros(4, 5)), ValueError, ("main_grad and dy", "4 and 3")),
    BadCall("k", lambda: call(main_grad=torch.zeros(3, 6)), ValueError, ("main_grad and x", "6 and 5")),
    BadCall("rows", lambda: call(x=stack(9, 5)), ValueError, ("dy and x", "8 and 9")),
    BadCall("mixed_dtypes", lambda: call(x=torch.zeros(8, 5)), TypeError, ("x", "bfloat16", "float32")),
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
        torch.ops.gtp.dense_wgrad_add_(torch.empty(3, 5), dy, x)
    assert count_guards(shape_env) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", (DENSE_CASES[0], DENSE_CASES[6]), ids=lambda case: case.name)
def test_opcheck(case: DenseCase, device: str) -> None:
    torch.library.opcheck(
        torch.ops.gtp.dense_wgrad_add_.default, (old_grads(case, device), *case.operands(torch.bfloat16, device))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_all_row_counts(backend: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(dense_wgrad_add_, backend=backend, fullgraph=True)
    for index, rows in enumerate((16, 41, 3)):
        case = DenseCase("", rows, n=8, k=12)
        dy, x = case.operands(torch.bfloat16, device)
        torch._dynamo.mark_dynamic(dy, 0)
        torch._dynamo.mark_dynamic(x, 0)
        main_grad = old_grads(case, device)
        expected = main_grad.clone()
        if index == 0:
            compiled(main_grad.clone(), dy, x)
        with no_recompiles():
            compiled(main_grad, dy, x)
        dense_wgrad_add_(expected, dy, x)
        assert same_bits(main_grad, expected)


class TestOnGpu:
    pytestmark = GPU_MARKS

    @pytest.mark.parametrize("case", (DENSE_CASES[0], DENSE_CASES[6]), ids=lambda case: case.name)
    def test_allocates_nothing_of_the_size_of_main_grad(self, case: DenseCase) -> None:
        big = DenseCase("", 64, n=1024, k=512, experts=case.experts)
        dy, x = big.operands(torch.bfloat16, "cuda")
        main_grad = old_grads(big, "cuda")
        dense_wgrad_add_(main_grad, dy, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        dense_wgrad_add_(main_grad, dy, x)
        assert torch.cuda.max_memory_allocated() - before < main_grad.nbytes // 2
