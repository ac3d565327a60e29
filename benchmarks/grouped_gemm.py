"""The grouped wgrad kernel beside what torch offers, on one GPU: `python benchmarks/grouped_gemm.py`.

Every cell is checked first: error against float64 on three experts, exact zeros for empty experts, an output that was
full of NaN, and bitwise repeatability. Where a check is red there is no table.
"""

import argparse

import torch
import torch.nn.functional as F
from shapes import PEAK_BYTES, PEAK_FLOPS, SHAPES, Shape, interleaved, offsets, split, versions

from gtp_compile.kernels import grouped_wgrad

COLUMNS = ("cell", "floor ms", "ours f32 ms", "over floor", "TFLOP/s", "grouped_mm bf16 ms", "grouped_mm().float() ms",
           "mm loop f32 ms", "bmm f32 ms", "ours / best true f32", "error")  # fmt: skip


def measure(name: str, shape: Shape, layer: str, kind: str) -> list[str]:
    (N, K), counts = shape.layer(layer), split(shape, kind)
    ends = torch.tensor(counts).cumsum(0).tolist()
    offs = offsets(counts)
    generator = torch.Generator(device="cuda").manual_seed(1)
    dy, x = (torch.randn(shape.T, w, device="cuda", dtype=torch.bfloat16, generator=generator) for w in (N, K))
    error = check(dy, x, offs, ends)
    out = torch.empty(shape.E, N, K, device="cuda", dtype=torch.float32)

    def loop() -> None:
        for e, (end, count) in enumerate(zip(ends, counts, strict=True)):
            if count:
                torch.mm(dy[end - count : end].t(), x[end - count : end], out_dtype=torch.float32, out=out[e])

    candidates = {
        "ours": lambda: grouped_wgrad(dy, x, offs, out_dtype=torch.float32),
        "grouped_mm": lambda: F.grouped_mm(dy.t(), x, offs=offs),
        "float": lambda: F.grouped_mm(dy.t(), x, offs=offs).float(),
        "loop": loop,
    }
    if kind == "balanced":
        dy3, x3 = (t.view(shape.E, -1, t.shape[1]) for t in (dy, x))
        candidates["bmm"] = lambda: torch.bmm(dy3.transpose(1, 2), x3, out_dtype=torch.float32)
    ms = interleaved(candidates)
    flops = 2 * shape.T * N * K
    floor = max(flops / PEAK_FLOPS, (2 * shape.T * (N + K) + 4 * shape.E * N * K) / PEAK_BYTES) * 1e3
    best = min(ms[c] for c in ("loop", "bmm") if c in ms)
    cells = [floor, ms["ours"], ms["ours"] / floor, flops / ms["ours"] * 1e-9, ms["grouped_mm"], ms["float"],
             ms["loop"], ms.get("bmm"), ms["ours"] / best]  # fmt: skip
    return [f"{name} {layer} {kind}", *("-" if c is None else f"{c:.3g}" for c in cells), f"{error:.1e}"]


def check(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, ends: list[int]) -> float:
    """Worst relative error of the largest, the smallest and the last expert; raises where anything else is wrong."""
    poison = torch.full((len(ends), dy.shape[1], x.shape[1]), float("nan"), device="cuda")
    del poison  # the next block of that size is full of NaN
    got = grouped_wgrad(dy, x, offs, out_dtype=torch.float32)
    assert torch.equal(got, grouped_wgrad(dy, x, offs, out_dtype=torch.float32)), "two runs differ"
    starts = [0, *ends[:-1]]
    sizes = [b - a for a, b in zip(starts, ends, strict=True)]
    filled = [e for e, n in enumerate(sizes) if n]
    assert all(not got[e].any() for e, n in enumerate(sizes) if not n), "an empty expert is not zero"
    worst = 0.0
    for e in {max(filled, key=sizes.__getitem__), min(filled, key=sizes.__getitem__), filled[-1]}:
        want = dy[starts[e] : ends[e], :256].double().t() @ x[starts[e] : ends[e]].double()
        worst = max(worst, ((got[e, :256].double() - want).norm() / want.norm()).item())
    assert worst <= 2e-5, f"error {worst}"
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    rows = [
        measure(name, SHAPES[name], layer, kind)
        for name in args.shapes
        for layer in ("fc1", "fc2")
        for kind in ("balanced", "zipf")
    ]
    print(versions())
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
