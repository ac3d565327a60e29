"""Gradients that reach a weight by unusual ways: none is lost, and none is rounded in silence."""

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gtp_compile
import gtp_compile.testing

IDS = [1, 5, 2, 7]


class Rows(nn.Module):
    """Some rows of a weight as the weight of a GEMM (a sampled softmax)."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.by = by

    def forward(self, x):
        ids = torch.tensor(IDS)
        if self.by == "index":
            return F.linear(x, self.weight[ids])
        if self.by == "embedding":
            return F.linear(x, F.embedding(ids, self.weight))
        return torch.bmm(x.expand(3, -1, -1), self.weight.t().expand(3, -1, -1))


def sharded(model: nn.Module, **kwargs) -> nn.Module:
    return gtp_compile.shard(model, init_device_mesh("cpu", (2,)), shard_fn=lambda *_: Shard(0), **kwargs)


def rows(rank: int, by: str) -> tuple[bool, float]:
    model = sharded(Rows(by), param_dtype=torch.bfloat16)
    x = torch.randn(33, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
    step = torch.compile(model, backend="gtp", options={"inner": "eager"})
    y = step(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    y.backward(dy)
    want = torch.zeros(8, 16, dtype=torch.float64)
    if by == "broadcast":
        want += torch.einsum("ern,rk->nk", dy.double(), x.double())
    else:
        want.index_add_(0, torch.tensor(IDS), dy.double().t() @ x.double())
    torch.distributed.all_reduce(want)
    got = model.weight.grad.full_tensor().double()
    (row,) = gtp_compile.explain(model, options={"inner": "eager"})(x).groups
    return row.matched, ((got - want / 2).norm() / (want / 2).norm()).item()


# torch 2.11 masks the rows before it adds them up, so they are an activation's gradient there, rounded as any.
MASKED = torch.__version__.startswith("2.11")


@pytest.mark.parametrize(
    ("by", "matched"),
    [
        ("index", True),
        pytest.param("embedding", True, marks=pytest.mark.skipif(MASKED, reason="masked in torch 2.11")),
        ("broadcast", True),
    ],
)
def test_a_gemm_behind_a_scatter_or_a_sum_is_typed_or_reported(by, matched):
    for found, error in run_ranks(rows, 2, by):
        assert found is matched
        assert (error <= 1e-6) is matched


def regularised(rank: int) -> list[float]:
    model = sharded(nn.Linear(16, 8, bias=False))
    step = torch.compile(model, backend="gtp", options={"inner": "eager"})
    errors = []
    for _ in range(2):
        model.zero_grad()
        penalty = (model.weight * model.weight).sum().full_tensor()  # on the DTensor itself
        (step(torch.randn(4, 16)).sum() * 0 + penalty).backward()
        want = 2 * model.weight.detach()
        errors.append((model.weight.grad - want).norm().full_tensor().item() / want.norm().full_tensor().item())
    return errors


def test_a_penalty_on_the_registered_parameter_counts_from_the_first_step():
    for errors in run_ranks(regularised, 2):
        assert max(errors) < 1e-6


def reassigned(rank: int) -> float:
    model = sharded(nn.Linear(16, 8, bias=False))
    x = torch.randn(4, 16)
    torch.compile(model, backend="gtp", options={"inner": "eager"})(x).sum().backward()
    model.weight.grad = model.weight.grad * 0.5
    (row,) = gtp_compile.verify(model, lambda y: y.sum(), options={"inner": "eager"})(x).groups
    return row.error


def test_verify_measures_the_step_alone():
    assert max(run_ranks(reassigned, 2)) < 1e-6


def frozen_member(rank: int) -> list[float]:
    model = sharded(gtp_compile.GroupedLinear(3, 4, 8, bias=False))
    model.weight1.requires_grad_(False)
    model.weight0.leaf.finalize_group_grads([torch.ones(8, 4), None, torch.ones(8, 4)])
    return [model.get_parameter(f"weight{i}").main_grad.sum().item() for i in range(3)]


def test_the_protocol_leaves_frozen_members_out():
    assert run_ranks(frozen_member, 2) == [[16.0, 0.0, 16.0]] * 2


def test_an_accumulator_that_no_kernel_writes_for_is_refused():
    with gtp_compile.testing.fake_mesh(2) as mesh:
        with pytest.raises(TypeError, match=r"main_grad_dtype: main_grad is float32, .*got torch.float64"):
            gtp_compile.shard(nn.Linear(4, 4), mesh, main_grad_dtype=torch.float64)
        model = gtp_compile.shard(nn.Linear(4, 4), mesh)
        with pytest.raises(TypeError, match=r"weight: main_grad is float32"):
            model.weight.main_grad = torch.zeros(4, 4, dtype=torch.float64)
