"""Cases, operands, float64 twins and error measures that the kernel tests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

GPU_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ("cpu", pytest.param("cuda", marks=GPU_MARKS))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("contiguous", "transposed", "gapped", "expanded")

# Relative Frobenius error that float32 accumulation may make against float64. Tensor cores truncate when they add.
FLOAT32_BOUND = {"cpu": 1e-6, "cuda": 2e-5}


@dataclass(frozen=True, slots=True)
class Case:
    """One ragged problem: rows of each expert, rows that belong to nobody, out and in features."""

    name: str
    counts: tuple[int, ...]
    n: int
    k: int
    tail: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.tail

    @property
    def slices(self) -> list[slice]:
        return [slice(begin, end) for begin, end in pairwise([0, *accumulate(self.counts)])]

    def offs(self, device: str = "cpu") -> Tensor:
        return torch.tensor(list(accumulate(self.counts)), dtype=torch.int32, device=device)

    def matrix(self, columns: int, dtype: torch.dtype, device: str = "cpu", *, layout: str, seed: int) -> Tensor:
        """Return [rows, columns] of noise with NaN in the tail."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.rows, columns, generator=generator)
        if layout == "expanded":
            values = values[:, :1]
        values[sum(self.counts) :] = torch.nan
        return with_layout(values.to(device, dtype), layout, columns)


CASES = (
    Case("even", (16, 16, 16), n=32, k=48),
    Case("ragged", (10, 0, 161, 28, 0, 5), n=24, k=40),
    Case("ragged_tail", (10, 0, 161, 28, 0, 5), n=24, k=40, tail=19),
    Case("odd_sizes", (3, 5, 1), n=7, k=13, tail=2),
    Case("beyond_one_tile", (130, 70, 0), n=131, k=197, tail=140),
    Case("first_expert_empty", (0, 9, 4), n=16, k=16),
    Case("last_expert_holds_all", (0, 0, 33), n=16, k=16, tail=3),
    Case("all_empty", (0, 0, 0), n=7, k=13, tail=21),
    Case("zero_rows", (0, 0, 0), n=7, k=13),
    Case("single", (1,), n=1, k=1),
    Case("one_row_each", (1,) * 9, n=5, k=33),
    Case("no_features", (4, 2), n=6, k=0, tail=1),
    Case("no_experts", (), n=6, k=4, tail=5),
)

RAGGED = Case("ragged_tail", (10, 0, 161, 28, 0, 5), n=24, k=40, tail=19)


def case_id(case: Case) -> str:
    return case.name


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operands(case: Case, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    """dy [R, N] and x [R, K] of a case."""
    dy = case.matrix(case.n, dtype, device, layout=layout, seed=1)
    x = case.matrix(case.k, dtype, device, layout=layout, seed=2)
    return dy, x


def with_layout(values: Tensor, layout: str, columns: int) -> Tensor:
    """Return the values under other strides: column-major, a window of a wider buffer, or one column repeated."""
    rows = values.shape[0]
    match layout:
        case "contiguous":
            return values.contiguous()
        case "transposed":
            return values.t().contiguous().t()
        case "gapped":
            buffer = values.new_full((2 * rows + 1, 2 * columns + 3), torch.nan)
            window = buffer[1::2, 3::2]
            return window.copy_(values)
        case "expanded":
            return values.expand(rows, columns)
    raise ValueError(layout)


def wgrad_float64(dy: Tensor, x: Tensor, slices: list[slice]) -> Tensor:
    dw = torch.zeros(len(slices), dy.shape[1], x.shape[1], dtype=torch.float64, device=dy.device)
    for expert, routed in enumerate(slices):
        dw[expert] = dy[routed].double().t() @ x[routed].double()
    return dw


def cut_into_parts(dw: Tensor, dim: int, parts: int) -> Tensor:
    """Return [E, N, K] cut along `dim` into [parts, E, c, K] or [parts, E, N, c], zeros behind the end."""
    chunk = -(-dw.shape[dim] // parts)
    missing = parts * chunk - dw.shape[dim]
    padded = F.pad(dw, (0, missing) if dim == 2 else (0, 0, 0, missing))
    return padded.unflatten(dim, (parts, chunk)).movedim(dim, 0)


def linear_float64(x: Tensor, weight: Tensor, slices: list[slice]) -> Tensor:
    """Loop over experts in float64; differentiable, and zero past the last expert."""
    parts = [x[routed].double() @ weight[expert].double().t() for expert, routed in enumerate(slices)]
    tail = x.shape[0] - sum(part.shape[0] for part in parts)
    return torch.cat([*parts, torch.zeros(tail, weight.shape[1], dtype=torch.float64, device=x.device)])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the error over that of `expected`, or the bare norm where `expected` is zero."""
    error, scale = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return error / scale if scale else error


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Compare float32 tensors by their bits: -0.0 is not 0.0, and a NaN equals itself."""
    return torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def error_bound(expected: Tensor, dtype: torch.dtype, device: str) -> float:
    """Return what float32 accumulation and one rounding to `dtype` may cost on this very data."""
    return FLOAT32_BOUND[device] + 1.05 * relative_error(expected.to(dtype), expected)


def poison_allocator(*shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Leave NaN in the freed blocks that outputs of these shapes get next, so that unwritten output shows."""
    blocks = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for shape, dtype in shapes for _ in range(4)]
    torch.cuda.synchronize()
    del blocks


def skip_without_memory(gib: int) -> None:
    """Skip a test whose tensors do not fit the GPU."""
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free} GiB free")


def count_guards(shape_env: ShapeEnv) -> int:
    """Return how many guards and run-time asserts a symbolic trace has collected."""
    return len(shape_env.guards) + sum(len(asserts) for asserts in shape_env.deferred_runtime_asserts.values())


class OpCounter(TorchDispatchMode):
    """Collect the names of the `gtp` ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gtp":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that must fail, and what its message must say."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    says: tuple[str, ...]


def assert_refused(bad: BadCall, where: str) -> None:
    """Check the error of a bad call on CPU, on the meta device or under fake tensors."""
    scope = {"cpu": nullcontext, "meta": lambda: torch.device("meta"), "fake": FakeTensorMode}[where]()
    with scope, pytest.raises(bad.error) as caught:
        bad.call()
    for fragment in bad.says:
        assert fragment in str(caught.value)


@contextmanager
def no_recompiles() -> Iterator[None]:
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
