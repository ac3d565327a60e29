"""Another tool's distributed weights over real ranks, beside ours: their hooks communicate, and nobody hangs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import (
    BF16,
    FP32,
    close,
    close_main_grad,
    compiled,
    double_leaf,
    expect,
    grouped64,
    linear64,
    no_outstanding_work,
    reduced,
    reductions,
    sharded,
    spy,
)
from ranks import run_ranks
from torch import Tensor, nn

from gtp_compile import GroupedLinear

EXPERTS, IN, MID, OUT = 3, 16, 8, 4


class TheirShard(nn.Parameter):
    """Rows of a weight; the leader gathers and reduces for its whole group, with collectives of its own."""

    is_distributed_weight = True

    def materialize_group_for_forward(self) -> list[Tensor]:
        local = torch.stack([w.detach() for w in self.group])
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return list(torch.cat(parts, 1))

    materialize_group_for_backward = materialize_group_for_forward

    def finalize_group_grads(self, wgrads: list[Tensor]) -> None:
        total = torch.stack(list(wgrads))
        dist.all_reduce(total)
        total /= dist.get_world_size()
        rows = self.shape[0]
        for weight, grad in zip(self.group, total, strict=True):
            weight.main_grad.add_(grad[dist.get_rank() * rows : (dist.get_rank() + 1) * rows])

    def grad_buffer(self) -> Tensor:
        return torch.empty(self.shape[0] * dist.get_world_size(), self.shape[1], dtype=FP32)


class Model(nn.Module):
    """x bf16[R, 16] -> dense, ours -> experts, theirs [R, 8] -> experts, ours [R, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(IN, IN, bias=False)
        self.theirs = GroupedLinear(EXPERTS, IN, MID, bias=False, dtype=BF16)
        self.ours = GroupedLinear(EXPERTS, MID, OUT, bias=False)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.ours(torch.tanh(self.theirs(torch.tanh(self.dense(x)), splits)), splits)


def give_away(op: GroupedLinear) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    group: list[Any] = []
    for i in range(op.num_gemms):
        local = getattr(op, f"weight{i}").detach().chunk(world)[rank].clone()
        shard = TheirShard(local)
        shard.main_grad = torch.zeros_like(local, dtype=FP32, requires_grad=False)
        shard.group = group
        group.append(shard)
        setattr(op, f"weight{i}", shard)
    return group


def stacked64(op: GroupedLinear) -> Tensor:
    return double_leaf(torch.stack([w.detach() for w in op.parameters()]))


def train(rank: int, is_compiled: bool) -> list[str]:
    torch.manual_seed(1)
    model = Model()
    dense, theirs, ours = double_leaf(model.dense.weight), stacked64(model.theirs), stacked64(model.ours)
    group = give_away(model.theirs)
    sharded(model)
    expect("left to its owner", [type(w) for w in model.theirs.parameters()], [TheirShard] * EXPERTS)
    run = compiled(model) if is_compiled else model
    counts = [5, 0, 3] if rank == 0 else [0, 11, 1]  # ranks differ in everything that they may differ in
    x = torch.randn(sum(counts), IN, generator=torch.Generator().manual_seed(rank)).to(BF16)
    with spy() as seen:
        run(x, torch.tensor(counts)).float().pow(2).sum().backward()
    y = linear64(x, dense)
    y = grouped64(torch.tanh(y), theirs, counts)
    grouped64(torch.tanh(y), ours, counts).float().pow(2).sum().backward()
    close_main_grad(model.dense.weight, reduced(dense.grad), 1e-2)  # bf16 activations differ between the two runs
    want = reduced(theirs.grad)
    for i, weight in enumerate(group):
        whole = [torch.empty_like(weight.main_grad) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, weight.main_grad)
        close(f"theirs.weight{i}", torch.cat(whole), want[i], 1e-2)
    for i, part in enumerate(reduced(ours.grad)):
        close_main_grad(getattr(model.ours, f"weight{i}"), part, 1e-2)
    no_outstanding_work()
    sizes = {c.numel for c in reductions(seen)}
    expect("dtype of every sum", {c.dtype for c in reductions(seen)}, {FP32})
    expect("one reduction of their group", sum(c.numel == EXPERTS * MID * IN for c in reductions(seen)), 1)
    expect("three groups, three reductions", (len(reductions(seen)), len(sizes)), (3, 3))
    return [repr(c) for c in seen]


@pytest.mark.dist
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_their_hooks_and_our_collectives_come_in_one_order(is_compiled):
    first, second = run_ranks(train, 2, is_compiled)
    assert first == second
