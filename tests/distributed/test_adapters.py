"""Low-rank adapters beside frozen weights: the adapters' gradients are right, the base costs neither wgrad nor sum."""

import pytest
import torch
from dist_helpers import (
    BF16,
    FP32,
    close_main_grad,
    compiled,
    double_leaf,
    expect,
    linear64,
    reduced,
    reductions,
    sharded,
    spy,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from uneven import loss

import gtp_compile

E, RANK, WIDTH = 3, 2, 16


class Adapted(nn.Module):
    """A frozen linear layer and frozen experts, each with a trained low-rank part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.experts = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(E, WIDTH, WIDTH) / 4)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.expert_down = nn.Parameter(torch.randn(E, RANK, WIDTH) / 4)
        self.expert_up = nn.Parameter(torch.randn(E, WIDTH, RANK) / 4)
        self.base.weight.requires_grad_(False)
        self.experts.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.up(self.down(x))
        rows = y.view(E, -1, WIDTH)
        low = torch.bmm(torch.bmm(rows, self.expert_down.mT), self.expert_up.mT)
        return (torch.bmm(rows, self.experts.mT) + low).flatten(0, 1)


def forward64(w: dict[str, Tensor], x: Tensor) -> Tensor:
    y = linear64(x, w["base.weight"]) + linear64(linear64(x, w["down.weight"]), w["up.weight"])
    out = []
    for e, rows in enumerate(y.chunk(E)):
        low = linear64(linear64(rows, w["expert_down"][e]), w["expert_up"][e])
        out.append(linear64(rows, w["experts"][e]) + low)
    return torch.cat(out)


def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    """The base is sharded; adapters are small, and replicated."""
    return Shard(param.ndim - 2) if fqn in ("base.weight", "experts") else Replicate()


def adapted(rank: int) -> None:
    torch.manual_seed(1)
    model = Adapted()
    exact = {n: double_leaf(p) for n, p in model.named_parameters()}
    sharded(model, shard_fn=place)
    step = compiled(model)
    base = {n: p.full_tensor().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(2):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank)).to(BF16)
        with spy() as seen:
            loss(step(x)).backward()
        expect("sums", [(c.kind, c.dtype) for c in reductions(seen)], [("all_reduce", FP32)] * 4)
        loss(forward64(exact, x)).backward()
    for name, param in model.named_parameters():
        if name in base:
            expect(f"{name}: no accumulator, no gradient", (param.main_grad, param.grad), (None, None))
        else:
            close_main_grad(param, reduced(exact[name].grad))
    for row in (*(e := gtp_compile.explain(model, options={"inner": "eager"})(x)).groups, *e.others):
        expect(f"{row.leader}: frozen", row.reason.startswith("frozen"), row.leader in base)
    optimizer.step()
    for name, value in base.items():
        expect(f"{name}: stays", torch.equal(model.get_parameter(name).full_tensor(), value), True)


@pytest.mark.works("LoRA adapters beside frozen weights", "the adapters' gradients; the rest costs no wgrad, no sum")
def test_adapters_beside_frozen_weights():
    run_ranks(adapted, 2)
