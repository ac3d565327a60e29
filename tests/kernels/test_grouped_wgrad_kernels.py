"""Both CUDA kernels of the grouped wgrad, each called by name, storing and adding."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_testing import (
    CASES,
    FLOAT32_BOUND,
    GPU_MARKS,
    Case,
    case_id,
    cut_into_parts,
    dtype_id,
    error_bound,
    relative_error,
    same_bits,
    wgrad_float64,
)
from torch import Tensor

from gtp_compile.kernels.grouped_wgrad.choice import Launcher, choose_grouped_wgrad

pytestmark = GPU_MARKS

HALF = (torch.bfloat16, torch.float16)
TILED = (
    Case("tails_of_8", (300, 0, 1025, 77, 2), n=520, k=264, tail=31),
    Case("odd_n", (300, 0, 1025, 77, 2), n=515, k=264, tail=31),
    Case("many_experts", tuple(37 * expert % 11 for expert in range(300)), n=72, k=56, tail=200),
    Case("around_the_step", (63, 64, 65, 0, 127, 128, 129, 1), n=136, k=128),
    Case("one_tile", (640,), n=128, k=128),
    Case("more_tiles_than_programs", (70, 1, 200), n=1024, k=1408),
)


def rounded(case: Case) -> Case:
    """Return the case with a multiple of 8 in features, as the choice of the Gluon kernel demands."""
    return replace(case, k=-(-case.k // 8) * 8)


ALL = tuple(rounded(case) for case in CASES if case.counts and case.k) + TILED


@pytest.fixture(params=["triton", "gluon"])
def kernel(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "triton":
        from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_triton

        return grouped_wgrad_triton
    if torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    pytest.importorskip("triton.experimental.gluon")
    from gtp_compile.kernels.grouped_wgrad.gluon import grouped_wgrad_gluon

    return grouped_wgrad_gluon


def aligned(case: Case, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return the case's matrix on rows that start at multiples of 16 bytes, with NaN between them."""
    values = case.matrix(columns, dtype, "cuda", layout="contiguous", seed=seed)
    buffer = values.new_full((case.rows, -(-columns // 8) * 8 + 8), torch.nan)
    return buffer[:, :columns].copy_(values)


def operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return aligned(case, case.n, dtype, 1), aligned(case, case.k, dtype, 2)


def guarded(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return an [E, N, K] output of NaN and the buffer around it, whose other values no kernel may touch."""
    buffer = torch.full((len(case.counts) + 2, case.n + 2, case.k + 8), torch.nan, device="cuda").to(dtype)
    return buffer[1:-1, 1:-1, : case.k], buffer


def assert_guard_intact(dw: Tensor, buffer: Tensor) -> None:
    dw.fill_(torch.nan)
    assert buffer.isnan().all()


def fresh(kernel: Launcher, dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    dw = torch.full((offs.shape[0], dy.shape[1], x.shape[1]), torch.nan, device="cuda")
    kernel(dy, x, offs, dw, accumulate=False)
    return dw


@pytest.mark.parametrize("dtype", HALF, ids=dtype_id)
@pytest.mark.parametrize("case", ALL, ids=case_id)
def test_stores(kernel: Launcher, case: Case, dtype: torch.dtype) -> None:
    dy, x = operands(case, dtype)
    expected = wgrad_float64(dy, x, case.slices)
    for out_dtype in {dtype, torch.float32}:
        dw, buffer = guarded(case, out_dtype)
        kernel(dy, x, case.offs("cuda"), dw, accumulate=False)
        bound = FLOAT32_BOUND["cuda"] if out_dtype == torch.float32 else error_bound(expected, out_dtype, "cuda")
        assert relative_error(dw, expected) <= bound
        for expert, count in enumerate(case.counts):
            assert count or not dw[expert].any(), "an empty expert must be exactly zero"
        assert_guard_intact(dw, buffer)


@pytest.mark.parametrize("dtype", HALF, ids=dtype_id)
@pytest.mark.parametrize("case", ALL, ids=case_id)
def test_adds(kernel: Launcher, case: Case, dtype: torch.dtype) -> None:
    dy, x = operands(case, dtype)
    total, buffer = guarded(case)
    filled = torch.tensor(case.counts, device="cuda")[:, None, None] > 0
    old = torch.where(filled, torch.randn(total.shape, device="cuda"), -0.0)
    total.copy_(old)
    kernel(dy, x, case.offs("cuda"), total, accumulate=True)
    assert relative_error(total, old.double() + wgrad_float64(dy, x, case.slices)) <= FLOAT32_BOUND["cuda"]
    assert same_bits(total, torch.where(filled, old + fresh(kernel, dy, x, case.offs("cuda")), old))
    assert_guard_intact(total, buffer)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("size", [64, 192])
def test_stores_parts(kernel: Launcher, size: int, dim: int, parts: int) -> None:
    """In parts of 64 or 192, as the choice of the Gluon kernel demands; the last one ends short of that."""
    n, k = (size * parts, 200) if dim == 1 else (200, size * parts)
    missing = parts - 1  # at most, or the parts were smaller
    case = Case("", (300, 0, 1025, 77, 2), n, k, tail=31)
    dy, x = operands(case, torch.bfloat16)
    dy[case.slices[3]] = torch.nan  # padding is zero all the same
    for out_dtype in (torch.bfloat16, torch.float32):
        dw = torch.full((len(case.counts), n, k), torch.nan, device="cuda", dtype=out_dtype)
        kernel(dy, x, case.offs("cuda"), dw, accumulate=False)
        short = dw.narrow(dim, 0, dw.shape[dim] - missing)
        expected = cut_into_parts(short, dim, parts).contiguous()
        buffer = torch.full((expected.numel() + 256,), torch.nan, device="cuda", dtype=out_dtype)
        got = buffer[128:-128].view(expected.shape)
        sides = (dy[:, : n - missing], x) if dim == 1 else (dy, x[:, : k - missing])
        kernel(*sides, case.offs("cuda"), got, accumulate=False, split_dim=dim)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert buffer[:128].isnan().all() and buffer[-128:].isnan().all()


def test_empty_experts_keep_even_nan(kernel: Launcher) -> None:
    case = Case("", (70, 0, 5, 0), n=136, k=72)
    total = torch.full((4, case.n, case.k), torch.nan, device="cuda")
    total[::2] = 0
    kernel(*operands(case, torch.bfloat16), case.offs("cuda"), total, accumulate=True)
    assert total[1::2].isnan().all() and total[::2].isfinite().all()


def test_rounds_once_in_the_store(kernel: Launcher) -> None:
    dy = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
    dy[:, 0], x[:, 0] = 1, torch.tensor([256.0, 1.0])
    dw = fresh(kernel, dy, x, torch.tensor([2], dtype=torch.int32, device="cuda"))
    assert dw[0, 0, 0].item() == 257 and dw.sum().item() == 257


def test_zero_rows(kernel: Launcher) -> None:
    case = Case("", (0, 0), n=8, k=16)
    dy, x = operands(case, torch.bfloat16)
    assert not fresh(kernel, dy, x, case.offs("cuda")).any()
    total = torch.full((2, 8, 16), -0.0, device="cuda")
    kernel(dy, x, case.offs("cuda"), total, accumulate=True)
    assert same_bits(total, torch.full_like(total, -0.0))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_expert(kernel: Launcher, poison: float) -> None:
    case = Case("", (90, 33, 161, 28, 1, 5), n=264, k=136, tail=19)
    dy, x = operands(case, torch.bfloat16)
    clean = fresh(kernel, dy, x, case.offs("cuda"))
    dy[case.slices[3]] = poison
    x[case.slices[3]] = poison
    dirty = fresh(kernel, dy, x, case.offs("cuda"))
    others = [0, 1, 2, 4, 5]
    assert not dirty[3].isfinite().any()
    assert same_bits(dirty[others], clean[others])


WRONG_OFFSETS = ([-5, 4, 900, 60, -1], [100, 20, 40, 2**31 - 1, 64], [-(2**31), 30, 30, 10, 2**31 - 1], [900] * 5)


@pytest.mark.parametrize("ends", WRONG_OFFSETS, ids=str)
def test_wrong_offsets_stay_inside_the_buffers(kernel: Launcher, ends: list[int]) -> None:
    case = Case("", (64,), n=136, k=72)
    dy, x = operands(case, torch.bfloat16)
    dw = fresh(kernel, dy, x, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    bounded = [(max(begin, 0), min(end, 64)) for begin, end in pairwise([0, *ends])]
    expected = wgrad_float64(dy, x, [slice(begin, max(begin, end)) for begin, end in bounded])
    assert relative_error(dw, expected) <= FLOAT32_BOUND["cuda"]


def random_cases(number: int) -> Iterator[Case]:
    generator = random.Random(7)
    for index in range(number):
        counts = [generator.choice((0, 1, generator.randrange(700))) for _ in range(generator.randrange(1, 40))]
        n, k = (8 * generator.randrange(1, 120) for _ in range(2))
        yield Case(f"random{index}", tuple(counts), n, k, tail=generator.randrange(100))


def test_random_splits_repeat_bit_by_bit(kernel: Launcher) -> None:
    for case in random_cases(24):
        dy, x = operands(case, torch.bfloat16)
        first = fresh(kernel, dy, x, case.offs("cuda"))
        assert relative_error(first, wgrad_float64(dy, x, case.slices)) <= FLOAT32_BOUND["cuda"], case
        old = torch.randn_like(first)
        filled = torch.tensor(case.counts, device="cuda")[:, None, None] > 0
        for _ in range(3):
            assert same_bits(fresh(kernel, dy, x, case.offs("cuda")), first), case
            total = old.clone()
            kernel(dy, x, case.offs("cuda"), total, accumulate=True)
            assert same_bits(total, torch.where(filled, old + first, old)), case


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "add"])
def test_does_not_synchronize(kernel: Launcher, accumulate: bool) -> None:
    case = TILED[0]
    dy, x = operands(case, torch.bfloat16)
    offs, dw = case.offs("cuda"), torch.zeros(len(case.counts), case.n, case.k, device="cuda")
    kernel(dy, x, offs, dw, accumulate=accumulate)  # compile first: loading a module may synchronize
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(dy, x, offs, dw, accumulate=accumulate)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "add"])
def test_replays_in_a_cuda_graph_with_other_offsets(kernel: Launcher, accumulate: bool) -> None:
    case = Case("", (10, 0, 161, 28, 0, 5), n=264, k=136)
    dy, x = operands(case, torch.bfloat16)
    offs, dw = case.offs("cuda"), torch.zeros(len(case.counts), case.n, case.k, device="cuda")
    kernel(dy, x, offs, dw, accumulate=accumulate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(dy, x, offs, dw, accumulate=accumulate)
    other = Case("", (0, 90, 3, 0, 104, 7), n=case.n, k=case.k)
    offs.copy_(other.offs("cuda"))
    dw.zero_()
    graph.replay()
    graph.replay()
    expected = wgrad_float64(dy, x, other.slices) * (1 + accumulate)
    assert relative_error(dw, expected) <= FLOAT32_BOUND["cuda"]


def test_one_build_for_all_row_counts(kernel: Launcher) -> None:
    """A count of 1 or a multiple of 16 is no reason to compile again."""
    import triton

    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["repr"])
    try:
        for index, rows in enumerate((48, 1, 17, 64, 4097)):
            case = Case("", (rows,), n=48, k=80)
            fresh(kernel, *operands(case, torch.bfloat16), case.offs("cuda"))
            if index == 0:
                compiled.clear()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_addresses_rows_and_outputs_past_2_31(kernel: Launcher) -> None:
    if torch.cuda.mem_get_info()[0] >> 30 < 40:
        pytest.skip("needs 40 GiB of free GPU memory")
    rows, n, k, live = (1 << 31) // 1024 + 512, 1024, 8, 300
    dy, x = (torch.empty(rows, size, dtype=torch.bfloat16, device="cuda") for size in (n, k))
    dy[-live:], x[-live:] = (torch.randn(live, size, device="cuda").bfloat16() for size in (n, k))
    offs = torch.tensor([0, rows - live, rows], dtype=torch.int32, device="cuda")
    dy[:-live], x[:-live] = 0, 0
    dw = fresh(kernel, dy, x, offs)
    assert not dw[:2].any()
    assert relative_error(dw[2], dy[-live:].double().t() @ x[-live:].double()) <= FLOAT32_BOUND["cuda"]
    del dy, x

    experts, n, k = 34, 8192, 8192
    assert experts * n * k > 2**31
    dy, x = (torch.randn(experts, size, device="cuda").bfloat16() for size in (n, k))
    dw = torch.full((experts, n, k), torch.nan, device="cuda")
    for twice in (False, True):
        kernel(dy, x, torch.arange(1, experts + 1, dtype=torch.int32, device="cuda"), dw, accumulate=twice)
    for expert in (0, experts - 1):
        assert torch.equal(dw[expert], 2 * dy[expert].float()[:, None] * x[expert].float())


def test_the_op_takes_the_kernel_of_this_gpu() -> None:
    import triton

    dy, x = operands(TILED[0], torch.bfloat16)
    dw = torch.empty(len(TILED[0].counts), TILED[0].n, TILED[0].k, device="cuda")
    hopper = not torch.version.hip and torch.cuda.get_device_capability()[0] == 9
    expected = "gluon" if hopper and triton.__version__.startswith("3.6.") else "triton"
    assert choose_grouped_wgrad(dy, x, dw).__name__ == f"grouped_wgrad_{expected}"
