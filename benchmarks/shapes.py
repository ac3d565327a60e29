"""Shapes, token splits and timing that the benchmarks share."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """The expert layers of one model: E experts, hidden H, expert intermediate I, T routed rows in one pass."""

    E: int
    H: int
    I: int  # noqa: E741
    T: int

    def layer(self, name: str) -> tuple[int, int]:
        """(N, K) of a layer: y[T, N] = x[T, K] @ W[e]^T with W[E, N, K]."""
        return (2 * self.I, self.H) if name == "fc1" else (self.H, self.I)


SHAPES = {
    "mixtral": Shape(8, 4096, 14336, 16384),  # Mixtral-8x7B
    "qwen3": Shape(128, 2048, 768, 65536),  # Qwen3-30B-A3B
    "dsv3": Shape(32, 7168, 2048, 32768),  # DeepSeek-V3, the experts of one EP rank
    "small": Shape(64, 1024, 512, 8192),
}

PEAK_FLOPS, PEAK_BYTES = 690e12, 4.29e12  # an H200: one dense product of the same layout; a device copy


def split(shape: Shape, kind: str) -> list[int]:
    """Rows of each expert: "balanced", or "zipf" (1 / rank in shuffled order, one expert in eight empty)."""
    E, T = shape.E, shape.T
    if kind == "balanced":
        return [T // E] * E
    generator = torch.Generator().manual_seed(0)
    p = 1.0 / torch.arange(1, E + 1, dtype=torch.float64)
    p[E - max(1, E // 8) :] = 0
    counts = (p / p.sum() * T).floor().long()
    counts[0] += T - counts.sum()
    return counts[torch.randperm(E, generator=generator)].tolist()


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Median over rounds of each candidate's median ms, in turns, in another order each round.

    The L2 cache is flushed before each run. The GPU first waits three milliseconds, so that launches are on their way
    by the time they are measured; a candidate of many small launches still shows the host's time.
    """
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0)
    for name in order:
        candidates[name]()
    torch.cuda.synchronize()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            runs = 5
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
            torch.cuda._sleep(6_000_000)
            for start, end in zip(starts, ends, strict=True):
                flush.zero_()
                start.record()
                candidates[name]()
                end.record()
            torch.cuda.synchronize()
            times[name].append(statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)))
    return {name: statistics.median(t) for name, t in times.items()}


def versions() -> str:
    """One line that says on what a table was measured."""
    import triton

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{torch.cuda.get_device_name()} x{torch.cuda.device_count()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, NCCL {nccl}"
    )
