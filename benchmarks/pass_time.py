"""How long our passes take of a compilation, and how that grows with the number of layers.

    python benchmarks/pass_time.py --layers 6,12,24,48 --experts 128

A decoder of attention projections, a router and two grouped linears a layer, all of them placed, on a fake mesh of
eight ranks. "discrete": each expert has a weight of its own, as in TransformerEngine's GroupedLinear, so that the graph
has layers x experts x 2 weights, and as many main_grads. "stacked": one weight for all experts of a layer.

Ours is the time in the partitioner, less that in torch's own min-cut partitioner: passes, checks, reports. The rest is
Dynamo, AOTAutograd and torch's passes over the joint graph, and with `--inner inductor` Inductor's code generation;
without it the graphs are run as they are.
"""

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gtp_compile
from gtp_compile import partition
from gtp_compile.session import Session, watch
from gtp_compile.testing import fake_mesh

WIDTH, TOKENS = 32, 64


class Layer(nn.Module):
    def __init__(self, experts: int, stacked: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.fc1, self.fc2 = (
            gtp_compile.GroupedLinear(experts, WIDTH, WIDTH, bias=False, single_grouped_weight=stacked)
            for _ in range(2)
        )

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o(torch.softmax(self.q(h) @ self.k(h).t(), -1) @ self.v(h))
        weight, _ = self.router(x).softmax(-1).max(-1, keepdim=True)
        return x + weight * self.fc2(torch.relu(self.fc1(x, splits)), splits)


class Decoder(nn.Module):
    def __init__(self, layers: int, experts: int, stacked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts, stacked) for _ in range(layers))

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, splits)
        return x


class Clock:
    """Wall time spent in a function, by replacing it in its owner."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)


def measure(layers: int, experts: int, stacked: bool, inner: str) -> dict[str, float]:
    """Compile one decoder; seconds in all, in our part, by pass, and the nodes of the joint graph."""
    torch._dynamo.reset()
    with fake_mesh(8) as mesh:
        model = Decoder(layers, experts, stacked)
        gtp_compile.shard(model, mesh, param_dtype=torch.bfloat16)
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
        splits = torch.full((experts,), TOKENS // experts)
        ours, theirs = PARTITIONER.seconds, MIN_CUT.seconds
        session = Session(keep_text=False)
        with watch(session):
            begin = time.perf_counter()
            torch.compile(model, backend="gtp", fullgraph=True, options={"inner": inner})(x, splits).sum().backward()
            total = time.perf_counter() - begin
    runs = session.graphs[0].log.runs
    return {
        "nodes": NODES[-1],
        "total": total,
        "ours": PARTITIONER.seconds - ours - (MIN_CUT.seconds - theirs),
        **{run.name: run.milliseconds / 1e3 for run in runs},
    }


NODES: list[int] = []
_joint = partition.GtpPartitioner._joint


def _count(self: Any, gm: torch.fx.GraphModule, *args: Any) -> Any:
    NODES.append(len(gm.graph.nodes))
    return _joint(self, gm, *args)


partition.GtpPartitioner._joint = _count  # type: ignore[method-assign]
PARTITIONER = Clock(partition.GtpPartitioner, "__call__")
MIN_CUT = Clock(partition, "min_cut_rematerialization_partition")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda s: [int(n) for n in s.split(",")], default=[6, 12, 24, 48])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--weights", choices=["discrete", "stacked"], default="discrete")
    parser.add_argument("--inner", choices=["eager", "inductor"], default="eager")
    args = parser.parse_args()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{versions}; {args.experts} experts, {args.weights}, {args.inner}")
    print("| layers | nodes of the joint graph | total s | ours s | share | us a node | slowest passes, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    measure(1, args.experts, args.weights == "stacked", args.inner)  # imports, and what torch builds once
    for layers in args.layers:
        found = measure(layers, args.experts, args.weights == "stacked", args.inner)
        nodes, total, ours = (found.pop(key) for key in ("nodes", "total", "ours"))
        slowest = sorted(found.items(), key=lambda item: -item[1])[:3]
        print(
            f"| {layers} | {nodes:,} | {total:.1f} | {ours:.2f} | {ours / total:.1%} | {ours / nodes * 1e6:.0f} | "
            + ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in slowest)
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
