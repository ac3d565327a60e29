"""`shard` on real ranks: whose values everybody gets, tied weights, meshes smaller than the world."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import (
    BF16,
    FP32,
    close_main_grad,
    compiled,
    expect,
    reduced,
    reductions,
    sharded,
    spy,
    whole,
    world_mesh,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from uneven import Tied

import gtp_compile


def shard_all(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard:
    return Shard(0)


class Buffers(nn.Module):
    """A linear layer and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("mask", torch.rand(8) > 0.5)
        self.register_buffer("steps", torch.randint(100, ()))
        self.register_buffer("table", torch.randn(4, 8).t(), persistent=False)  # strided
        self.register_buffer("rounded", torch.randn(8).to(BF16))


def seeded_apart(rank: int, src: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = Buffers()
    mine = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    sharded(model, src_data_rank=src)
    full = [whole(p, p.detach()).to(p.dtype) for p in model.parameters()]
    expect("strides of buffers", model.table.stride(), (1, 8))
    return [mine, [*full, *model.buffers()]]


@pytest.mark.parametrize("src", [0, 1])
def test_everybody_gets_the_source_ranks_values(src):
    ranks = run_ranks(seeded_apart, 2, src)
    for _, got in ranks:
        for a, b in zip(got, ranks[src][0], strict=True):
            assert torch.equal(a, b)


def unequal(rank: int) -> str:
    torch.manual_seed(0)
    model = Buffers()
    with torch.no_grad():
        model.linear.bias += rank
    with pytest.raises(ValueError) as caught:
        sharded(model, src_data_rank=None)
    torch.manual_seed(0)
    with spy() as seen:
        sharded(Buffers(), src_data_rank=None)
    expect("what travels is a digest", max(c.numel for c in seen) < 2000, True)
    return str(caught.value)


def test_unequal_ranks_are_an_error_without_a_source_rank():
    for message in run_ranks(unequal, 2):
        assert message == (
            "linear.bias: its values on rank(s) [1] differ from those on rank 0; seed the ranks alike, or let shard "
            "send one rank's values to all with src_data_rank=0"
        )


def tied(rank: int) -> None:
    torch.manual_seed(1)
    model = Tied(32)
    weight = model.head.weight.detach().to(BF16)
    sharded(model, shard_fn=lambda f, m, p: Shard(0), reduce_op="sum")
    expect("one parameter", len(list(model.parameters())), 1)
    expect("one object", model.head.weight is model.embedding.weight, True)
    expect("its name", model.head.weight.leaf.fqn, "embedding.weight")
    tokens = torch.randint(32, (12,), generator=torch.Generator().manual_seed(rank))
    dy = torch.randn(12, 32, generator=torch.Generator().manual_seed(rank)).to(BF16)
    with spy() as seen:
        compiled(model)(tokens).backward(dy)
    expect("one reduction for both uses", len(reductions(seen)), 1)
    want = dy.double().t() @ weight[tokens].double()
    want.index_add_(0, tokens, dy.double() @ weight.double())  # this GEMM's result goes nowhere else: typed, too
    # torch 2.11 masks its rows first, which makes them an activation's gradient, rounded as any.
    close_main_grad(model.head.weight, reduced(want, "sum"), 2.0**-8 if torch.__version__.startswith("2.11") else 1e-6)


def test_tied_parameters_are_one_weight():
    run_ranks(tied, 2)


def one_rank(rank: int) -> None:
    model = nn.Linear(16, 32, bias=False)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "gtp"))["gtp"]
    gtp_compile.shard(model, mesh, shard_fn=shard_all, param_dtype=BF16)
    x, dy = torch.randn(4, 16).to(BF16), torch.randn(4, 32).to(BF16)
    with spy() as seen:
        compiled(model)(x).backward(dy)
    expect("collectives of a mesh of one", seen, [])
    close_main_grad_local(model.weight, dy.double().t() @ x.double())


def close_main_grad_local(param: nn.Parameter, want: Tensor) -> None:
    expect("dtype", param.main_grad.dtype, FP32)
    expect("small error", (param.main_grad.double() - want).norm().item() <= 1e-6 * want.norm().item(), True)


def test_a_mesh_of_one_rank_communicates_nothing():
    run_ranks(one_rank, 2)


def submesh(rank: int) -> None:
    """Two groups of two ranks: each sums over its own."""
    torch.manual_seed(1)
    model = nn.Linear(16, 32, bias=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "gtp"))["gtp"]
    gtp_compile.shard(model, mesh, shard_fn=shard_all, param_dtype=BF16)
    g = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(4, 16, generator=g).to(BF16), torch.randn(4, 32, generator=g).to(BF16)
    compiled(model)(x).backward(dy)
    want = dy.double().t() @ x.double()
    dist.all_reduce(want, group=mesh.get_group())
    close_main_grad_local(model.weight, (want / 2).chunk(2)[mesh.get_local_rank()])


def test_a_mesh_that_is_part_of_the_world():
    run_ranks(submesh, 4)


def test_functional_call_is_refused():
    for message in run_ranks(called, 2):
        assert message.startswith("weight: another tensor stands in its place (functional_call?)")


def called(rank: int) -> str:
    model = gtp_compile.shard(nn.Linear(8, 8), world_mesh())
    with pytest.raises(RuntimeError) as caught:
        torch.func.functional_call(model, {"weight": torch.zeros(8, 8)}, torch.zeros(1, 8))
    return str(caught.value)
