"""One MoE block on one GPU, forward, backward and float32 accumulation: `python benchmarks/moe_block.py`.

Router, permute, fc1, SwiGLU, fc2, unpermute, in bf16. "eager" and "compiled" add each bf16 gradient to a float32
main_grad in a hook; "gtp" is the same block, unchanged, over a mesh of one rank. All are measured in turns in one
process. Where their gradients disagree there is no table.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shapes import SHAPES, Shape, versions
from steps import check_alike, gradients, hook_main_grads, kernels, mesh_of_one, peak, print_table, race
from torch import Tensor, nn

import gtp_compile

TOP_K = {"mixtral": 2, "qwen3": 8, "dsv3": 8, "small": 2}
# Every value is rounded to bf16, at other places: 2 ** -8, and a little.
BOUND = 1e-2


class MoE(nn.Module):
    """A block of E experts; `skew` [E] is added to the router's logits, -inf for experts that shall get no rows."""

    def __init__(self, shape: Shape, top_k: int, skew: Tensor) -> None:
        super().__init__()

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, device="cuda", dtype=torch.bfloat16).mul_(size[-1] ** -0.5))

        self.num_experts, self.top_k = shape.E, top_k
        self.router = weight(shape.E, shape.H)
        self.w1, self.w2 = weight(shape.E, 2 * shape.I, shape.H), weight(shape.E, shape.H, shape.I)
        self.register_buffer("skew", skew)

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.router).float() + self.skew
        p, idx = logits.softmax(-1).topk(self.top_k, dim=-1)
        p = (p / p.sum(-1, keepdim=True)).to(x.dtype)
        expert, order = idx.flatten().sort()
        offs = torch.histc(expert.int(), bins=self.num_experts, min=0, max=self.num_experts - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // self.top_k], self.w1.transpose(-2, -1), offs=offs).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=offs)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        return (y[back].view(*idx.shape, -1) * p.unsqueeze(-1)).sum(1)


def skew_of(kind: str, experts: int) -> Tensor:
    """Nothing for near-even routing; "zipf": log(1 / rank), one expert in eight never chosen, in shuffled order."""
    if kind == "even":
        return torch.zeros(experts, device="cuda")
    skew = -torch.arange(1, experts + 1, device="cuda").float().log()
    skew[experts - max(1, experts // 8) :] = -torch.inf
    return skew[torch.randperm(experts, generator=torch.Generator().manual_seed(0)).cuda()]


def measure(name: str, kind: str, mesh: object, profiled: bool) -> list[list[str]]:
    shape, top_k = SHAPES[name], TOP_K[name]
    tokens = shape.T // top_k
    torch.manual_seed(0)
    block = MoE(shape, top_k, skew_of(kind, shape.E))
    state = {key: value.detach().clone() for key, value in block.state_dict().items()}
    x = torch.randn(tokens, shape.H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn(tokens, shape.H, device="cuda", dtype=torch.bfloat16)

    def again() -> MoE:
        other = MoE(shape, top_k, state["skew"])
        other.load_state_dict(state)
        return other

    modules: dict[str, nn.Module] = {
        "eager": hook_main_grads(block),
        "compiled": hook_main_grads(again()),
        "gtp": gtp_compile.shard(again(), mesh),
    }
    run = {
        "eager": modules["eager"],
        "compiled": torch.compile(modules["compiled"], fullgraph=True),
        "gtp": torch.compile(modules["gtp"], fullgraph=True, backend="gtp"),
    }

    def step_of(fn: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            x.grad = None
            fn(x).backward(dout)

        return step

    steps = {mode: step_of(fn) for mode, fn in run.items()}
    grads = {mode: gradients(step, modules[mode]) for mode, step in steps.items()}
    differences = {mode: check_alike(grads[mode], grads["compiled"], BOUND) for mode in steps}
    del grads
    ms = race(steps)
    gib = {mode: peak(step) for mode, step in steps.items()}
    if profiled:
        for mode in ("compiled", "gtp"):
            print(f"\n{name} {kind} {mode}\n{kernels(steps[mode])}", flush=True)
    flops = 18 * shape.T * shape.H * shape.I
    return [
        [
            f"{name} {kind}",
            mode,
            f"{ms[mode]:.3g}",
            f"{flops / ms[mode] * 1e-9:.0f}",
            f"{ms[mode] / ms['compiled']:.3f}",
        ]
        + [f"{gib[mode]:.2f}", f"{differences[mode]:.1e}"]
        for mode in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["qwen3", "mixtral"], choices=list(SHAPES))
    parser.add_argument("--routing", nargs="*", default=["even", "zipf"], choices=["even", "zipf"])
    parser.add_argument("--profile", action="store_true", help="print device time by kernel, too")
    args = parser.parse_args()
    mesh, rows = mesh_of_one(), []
    for name in args.shapes:
        for kind in args.routing:
            torch._dynamo.reset()
            rows += measure(name, kind, mesh, args.profile)
            torch.cuda.empty_cache()
    print(f"\n{versions()}; ms a step, GiB that a step takes beyond what is held, difference of main_grad\n")
    print_table(["block", "mode", "ms", "TFLOP/s", "over compiled", "peak GiB", "difference"], rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
