"""The grouped wgrad kernels beside what torch offers, on one GPU: `python benchmarks/grouped_gemm.py`.

Every cell is checked first, for the op and for the plain Triton kernel: error against float64 on three experts, exact
zeros or untouched gradients for empty experts, an output that was full of NaN, bitwise repeatability, and an
accumulating form that equals the old value plus the fresh one bit by bit. Where a check is red there is no table.
"""

import argparse
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from shapes import PEAK_BYTES, PEAK_FLOPS, SHAPES, Shape, interleaved, offsets, split, versions
from torch import Tensor

from gtp_compile.kernels import grouped_wgrad, grouped_wgrad_add_, grouped_wgrad_parts
from gtp_compile.kernels.grouped_wgrad.choice import choose_grouped_wgrad
from gtp_compile.kernels.grouped_wgrad.triton import grouped_wgrad_triton

# Of each table: the op, the plain kernel, rivals that are true float32, and torch's own form, which rounds to bf16.
FRESH_RIVALS = ("inductor", "mm loop", "bmm")
ADD_RIVALS = ("addmm loop", "addmm graph", "baddbmm")


class Cell:
    """One layer of one model under one split."""

    def __init__(self, name: str, shape: Shape, layer: str, kind: str) -> None:
        self.name = f"{name} {layer} {kind}"
        (self.N, self.K), self.E, self.T = shape.layer(layer), shape.E, shape.T
        self.counts = split(shape, kind)
        self.balanced = kind == "balanced"
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        self.rows = [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        self.filled = [e for e, count in enumerate(self.counts) if count]
        self.offs = offsets(self.counts)
        generator = torch.Generator(device="cuda").manual_seed(1)
        self.dy, self.x = (
            torch.randn(self.T, w, device="cuda", dtype=torch.bfloat16, generator=generator) for w in (self.N, self.K)
        )
        self.dw = torch.zeros(self.E, self.N, self.K, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(4)]

    def floor(self, accumulate: bool) -> float:
        """Ms that the products or the bytes take at least."""
        passes = 2 * len(self.filled) if accumulate else self.E
        nbytes = 2 * self.T * (self.N + self.K) + 4 * passes * self.N * self.K
        return max(2 * self.T * self.N * self.K / PEAK_FLOPS, nbytes / PEAK_BYTES) * 1e3

    @cached_property
    def truth(self) -> dict[int, Tensor]:
        """The first and the last rows of the largest, the smallest and the last expert's gradient, in float64."""
        picks = {max(self.filled, key=self.counts.__getitem__), min(self.filled, key=self.counts.__getitem__)}
        return {
            e: self.ends_of(self.dy[self.rows[e]].mT).double() @ self.x[self.rows[e]].double()
            for e in picks | {self.filled[-1]}
        }

    def ends_of(self, matrix: Tensor) -> Tensor:
        return torch.cat([matrix[:256], matrix[-64:]])

    def grouped_by_expert(self) -> tuple[Tensor, Tensor]:
        return self.dy.view(self.E, -1, self.N).mT, self.x.view(self.E, -1, self.K)

    # Candidates that store

    def ours(self) -> Tensor:
        return grouped_wgrad(self.dy, self.x, self.offs, out_dtype=torch.float32)

    def plain(self) -> Tensor:
        grouped_wgrad_triton(self.dy, self.x, self.offs, self.dw, accumulate=False)
        return self.dw

    def mm_loop(self) -> None:
        for e in self.filled:
            torch.mm(self.dy[self.rows[e]].t(), self.x[self.rows[e]], out_dtype=torch.float32, out=self.dw[e])

    def parts(self, dim: int, ranks: int) -> Tensor:
        return grouped_wgrad_parts(self.dy, self.x, self.offs, dim, ranks, out_dtype=torch.float32)

    def packed(self, ranks: int) -> Tensor:
        return self.ours().view(self.E, ranks, -1, self.K).transpose(0, 1).contiguous()

    # Candidates that add

    def ours_add(self) -> None:
        grouped_wgrad_add_(self.dw, self.dy, self.x, self.offs)

    def plain_add(self) -> None:
        grouped_wgrad_triton(self.dy, self.x, self.offs, self.dw, accumulate=True)

    def addmm_loop(self) -> None:
        for e in self.filled:
            self.addmm(e)

    def addmm(self, e: int) -> None:
        dw, rows = self.dw[e], self.rows[e]
        torch.addmm(dw, self.dy[rows].t(), self.x[rows], out_dtype=torch.float32, out=dw)

    def addmm_graph(self) -> Callable[[], None]:
        """The loop on four streams, recorded: with counts that change no training step can replay it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            current = torch.cuda.current_stream()
            for stream in self.streams:
                stream.wait_stream(current)
            for turn, e in enumerate(self.filled):
                with torch.cuda.stream(self.streams[turn % len(self.streams)]):
                    self.addmm(e)
            for stream in self.streams:
                current.wait_stream(stream)
        return graph.replay


def check(cell: Cell, store: Callable[[], Tensor], add: Callable[[], None]) -> tuple[float, float]:
    """Return the worst relative errors of storing and adding; raise where anything else is wrong."""
    poison = torch.full_like(cell.dw, torch.nan)
    del poison  # the next block of that size is full of NaN
    cell.dw.fill_(torch.nan)
    fresh = store().clone()
    cell.dw.fill_(torch.nan)
    assert torch.equal(store(), fresh), "two runs differ"
    empty = [e for e, count in enumerate(cell.counts) if not count]
    assert not fresh[empty].any(), "an empty expert is not zero"

    old = torch.randn(cell.dw.shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))
    cell.dw.copy_(old)
    add()
    for e in range(cell.E):
        expected = old[e] + fresh[e] if cell.counts[e] else old[e]
        assert torch.equal(cell.dw[e], expected), "the sum is not the old value plus the fresh one"
    stored = max(relative_error(cell.ends_of(fresh[e]), want) for e, want in cell.truth.items())
    added = max(
        relative_error(cell.ends_of(cell.dw[e]), want + cell.ends_of(old[e]).double()) for e, want in cell.truth.items()
    )
    assert max(stored, added) <= 2e-5, f"errors {stored} and {added}"
    return stored, added


def measure_parts(cell: Cell) -> list[str]:
    """Check and time what a reduce-scatter over 2 or 8 ranks sends; return the cell's row."""
    whole = cell.ours()
    for ranks in (2, 8):
        assert torch.equal(cell.parts(1, ranks), cell.packed(ranks)), "parts of rows differ from the packed gradient"
        columns = cell.parts(2, ranks)
        for part, want in zip(columns, whole.chunk(ranks, 2), strict=True):
            assert torch.equal(part, want), "parts of columns differ"
    del whole, columns, part, want
    ms = interleaved(
        {
            "whole": cell.ours,
            "rows, W = 2": lambda: cell.parts(1, 2),
            "rows, W = 8": lambda: cell.parts(1, 8),
            "columns, W = 8": lambda: cell.parts(2, 8),
            "whole, then packed, W = 8": lambda: cell.packed(8),
        }
    )
    return [cell.name, *(f"{t:.3g}" for t in ms.values()), f"{ms['rows, W = 8'] / ms['whole']:.3g}"]


PARTS_COLUMNS = [
    "cell", "whole", "rows, W = 2", "rows, W = 8", "columns, W = 8", "whole, then packed, W = 8", "rows, W = 8 / whole",
]  # fmt: skip


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def inductor_template() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Inductor's Triton template with the float32 cast fused; with the tile that won its full search on an H200."""
    from torch._inductor.kernel import mm_grouped

    winner = (128, 256, 64)
    mm_grouped._NV_CONFIGS = [
        config
        for config in mm_grouped._NV_CONFIGS
        if config.num_warps == 8 and tuple(config.kwargs[f"BLOCK_{axis}"] for axis in "MNK") == winner
    ]
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    return torch.compile(
        lambda dy, x, offs: F.grouped_mm(dy.t(), x, offs=offs).float(), dynamic=False, fullgraph=True, options=options
    )


def measure(cell: Cell, inductor: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[list[str], list[str]]:
    """Check and time one cell; return its row in either table."""
    stored, added = check(cell, cell.ours, cell.ours_add)
    check(cell, cell.plain, cell.plain_add)
    fresh: dict[str, Callable[[], object]] = {
        "ours": cell.ours,
        "plain": cell.plain,
        "grouped_mm": lambda: F.grouped_mm(cell.dy.t(), cell.x, offs=cell.offs),
        "inductor": lambda: inductor(cell.dy, cell.x, cell.offs),
        "mm loop": cell.mm_loop,
    }
    adds: dict[str, Callable[[], object]] = {
        "ours": cell.ours_add,
        "plain": cell.plain_add,
        "addmm loop": cell.addmm_loop,
    }
    if cell.balanced:
        dy, x = cell.grouped_by_expert()
        fresh["bmm"] = lambda: torch.bmm(dy, x, out_dtype=torch.float32, out=cell.dw)
        adds["baddbmm"] = lambda: torch.baddbmm(cell.dw, dy, x, out_dtype=torch.float32, out=cell.dw)
    fresh_ms = interleaved(fresh)
    cell.addmm_loop()  # cuBLAS allocates before the capture
    adds["addmm graph"] = cell.addmm_graph()
    cell.dw.zero_()
    add_ms = interleaved(adds)
    flops = 2 * cell.T * cell.N * cell.K
    return (
        row(cell, cell.floor(False), flops, fresh_ms, FRESH_RIVALS, ["grouped_mm"], stored),
        row(cell, cell.floor(True), flops, add_ms, ADD_RIVALS, [], added),
    )


def row(
    cell: Cell, floor: float, flops: int, ms: dict[str, float], rivals: tuple[str, ...], rest: list[str], error: float
) -> list[str]:
    ours, best = ms["ours"], min(ms[rival] for rival in rivals if rival in ms)
    numbers = [
        floor,
        ours,
        ours / floor,
        flops / ours * 1e-9,
        ms["plain"],
        *(ms.get(name) for name in (*rivals, *rest)),
    ]
    cells = ["-" if number is None else f"{number:.3g}" for number in [*numbers, ours / best]]
    return [cell.name, *cells, f"{error:.1e}"]


def print_table(title: str, rivals: tuple[str, ...], rest: list[str], rows: list[list[str]]) -> None:
    columns = [
        "cell",
        "floor",
        "op",
        "op / floor",
        "TFLOP/s",
        "plain Triton",
        *rivals,
        *rest,
        "op / best rival",
        "error",
    ]
    print_rows(title, columns, rows)


def print_rows(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    for line in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(line) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--parts", action="store_true", help="only what a reduce-scatter sends")
    args = parser.parse_args()
    inductor = inductor_template()
    fresh, adds, parts, chosen = [], [], [], set()
    for name in args.shapes:
        for layer in ("fc1", "fc2"):
            torch._dynamo.reset()
            for kind in ("balanced", "zipf"):
                cell = Cell(name, SHAPES[name], layer, kind)
                chosen.add(choose_grouped_wgrad(cell.dy, cell.x, cell.dw).__name__)
                parts.append(measure_parts(cell))
                if not args.parts:
                    for rows, line in zip((fresh, adds), measure(cell, inductor), strict=True):
                        rows.append(line)
                del cell
                torch.cuda.empty_cache()
    print(f"{versions()}; the op ran {', '.join(sorted(chosen))}; ms")
    if not args.parts:
        print_table("Fresh float32 gradients", FRESH_RIVALS, ["grouped_mm bf16"], fresh)
        print_table("Added to float32 main_grad", ADD_RIVALS, [], adds)
    print_rows("Stored in the order of a reduce-scatter over W ranks", PARTS_COLUMNS, parts)


if __name__ == "__main__":
    main()
