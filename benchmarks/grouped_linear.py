"""fprop and dgrad of all experts beside `F.grouped_mm`, on one GPU: `python benchmarks/grouped_linear.py`.

The weight is whole, or in eight parts as an all-gather over eight ranks leaves it (there torch has to copy first).
Every cell is checked before it is timed: error against float64 on three experts, an output that was full of NaN,
bitwise repeatability. Where a check is red there is no table.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shapes import PEAK_BYTES, PEAK_FLOPS, SHAPES, Shape, interleaved, offsets, split, versions
from torch import Tensor

from gtp_compile.kernels.grouped_linear.choice import choose_grouped_linear
from gtp_compile.kernels.grouped_linear.triton import grouped_linear_triton

RANKS = 8
ERROR = 3e-3  # that of rounding once to bf16, and a little


class Cell:
    """One layer of one model under one split, forward or backward: y [T, N] = x [T, K] @ w[e]^T, w [E, N, K]."""

    def __init__(self, name: str, shape: Shape, layer: str, kind: str, role: str) -> None:
        self.name = f"{name} {layer} {role} {kind}"
        self.counts = split(shape, kind)
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        self.rows = [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        self.offs = offsets(self.counts)
        out, features = shape.layer(layer)
        generator = torch.Generator(device="cuda").manual_seed(1)
        stored = torch.randn(shape.E, out, features, device="cuda", dtype=torch.bfloat16, generator=generator)
        gathered = stored.view(shape.E, RANKS, -1, features).transpose(0, 1).contiguous()
        self.dim = 1 if role == "fprop" else 2
        self.weight = stored if role == "fprop" else stored.mT
        self.parts = gathered if role == "fprop" else gathered.mT
        self.gathered = gathered
        _, self.N, self.K = self.weight.shape
        self.T = shape.T
        self.x = torch.randn(self.T, self.K, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.y = torch.empty(self.T, self.N, device="cuda", dtype=torch.bfloat16)

    def floor(self) -> float:
        """Ms that the products or the bytes take at least."""
        filled = sum(count > 0 for count in self.counts)
        nbytes = 2 * (self.T * (self.N + self.K) + filled * self.N * self.K)
        return max(2 * self.T * self.N * self.K / PEAK_FLOPS, nbytes / PEAK_BYTES) * 1e3

    def whole(self) -> Tensor:
        choose_grouped_linear(self.x, self.weight, self.y)(self.x, self.weight, self.offs, self.y)
        return self.y

    def in_parts(self) -> Tensor:
        launch = choose_grouped_linear(self.x, self.parts, self.y, self.dim)
        launch(self.x, self.parts, self.offs, self.y, None, self.dim)
        return self.y

    def plain(self) -> Tensor:
        grouped_linear_triton(self.x, self.weight, self.offs, self.y)
        return self.y

    def grouped_mm(self) -> Tensor:
        return F.grouped_mm(self.x, self.weight.mT, offs=self.offs)

    def copied(self) -> Tensor:
        joined = self.gathered.transpose(0, 1).flatten(1, 2)
        return F.grouped_mm(self.x, joined.mT if self.dim == 1 else joined, offs=self.offs)

    def check(self, run: Callable[[], Tensor]) -> float:
        """The worst relative error; raises where anything is wrong."""
        self.y.fill_(torch.nan)
        first = run().clone()
        self.y.fill_(torch.nan)
        assert torch.equal(run(), first), f"{self.name}: two runs differ"
        filled = [e for e, count in enumerate(self.counts) if count]
        picks = {max(filled, key=self.counts.__getitem__), min(filled, key=self.counts.__getitem__), filled[-1]}
        worst = 0.0
        for e in picks:
            rows = slice(self.rows[e].start, self.rows[e].stop, max(1, self.counts[e] // 256))
            want = self.x[rows].double() @ self.weight[e].double().t()
            worst = max(worst, ((first[rows].double() - want).norm() / want.norm()).item())
        assert first.isfinite().all(), f"{self.name}: not every row was written"
        assert worst <= ERROR, f"{self.name}: error {worst}"
        return worst


def measure(cell: Cell) -> list[str]:
    error = max(cell.check(run) for run in (cell.whole, cell.in_parts, cell.plain))
    runs = {
        "whole": cell.whole,
        "parts": cell.in_parts,
        "plain": cell.plain,
        "grouped_mm": cell.grouped_mm,
        "copied": cell.copied,
    }
    ms = interleaved(runs, rounds=5)
    floor = cell.floor()
    numbers = [floor, *ms.values(), ms["whole"] / floor, ms["whole"] / ms["grouped_mm"], ms["parts"] / ms["whole"]]
    return [cell.name, *(f"{number:.3g}" for number in numbers), f"{error:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    rows, chosen = [], set()
    for name in args.shapes:
        for layer in ("fc1", "fc2"):
            for role in ("fprop", "dgrad"):
                for kind in ("balanced", "zipf"):
                    cell = Cell(name, SHAPES[name], layer, kind, role)
                    chosen.add(choose_grouped_linear(cell.x, cell.parts, cell.y, cell.dim).__name__)
                    rows.append(measure(cell))
                    print("| " + " | ".join(rows[-1]) + " |", flush=True)
                    del cell
                    torch.cuda.empty_cache()
    print(f"\n{versions()}; the op ran {', '.join(sorted(chosen))}; ms\n")
    columns = ["cell", "floor", "whole", f"{RANKS} parts", "plain Triton", "grouped_mm", "copy, grouped_mm"]
    columns += ["whole / floor", "whole / grouped_mm", "parts / whole", "error"]
    for line in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
