"""`verify` against float64, on two and four ranks: what retyping gains, and that a look leaves no trace."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import BF16, FP32, close_main_grad, expect, reduced, shard_matrices, sharded
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import gtp_compile
from gtp_compile import GroupedLinear


class Moe(nn.Module):
    """Embedding, norm, sharded and replicated linear layers, discrete and stacked experts, torch's own grouped GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.router = nn.Linear(16, 16)
        self.discrete = GroupedLinear(3, 16, 16)
        self.stacked = GroupedLinear(3, 16, 16, bias=False, single_grouped_weight=True)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)  # [E, K, N], for torch._grouped_mm
        self.register_buffer("seen", torch.zeros(20))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, splits: Tensor) -> Tensor:
        self.seen.add_(torch.ones(20))
        x = self.norm(self.embedding(tokens))
        x = x + self.down(torch.relu(self.up(x)))
        x = self.dropout(x + self.down(torch.relu(self.up(self.router(x)))))
        x = x + self.stacked(self.discrete(x, splits), splits)
        return x + torch._grouped_mm(x, self.experts, splits.cumsum(0).to(torch.int32))


GEMMS = ["experts", "up.weight", "down.weight", "router.weight", "discrete.weight0", "stacked.weight"]
OTHERS = ["embedding.weight", "norm.weight", "up.bias", "router.bias", "discrete.bias0"]


def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    if fqn == "experts":
        return Shard(2)
    return Replicate() if "router" in fqn else shard_matrices(fqn, module, param)


def loss(y: Tensor) -> Tensor:
    # The gradient of each entry is near 1.0078125 = 1 + 2^-7, the last step of bfloat16 above 1: sums must be rounded.
    return y.float().mul(1.0078125).sum() + y.float().pow(2).sum() * 0.01


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(20, (24,), generator=torch.Generator().manual_seed(rank))
    return tokens, torch.tensor([9, 0, 15] if rank % 2 else [7, 11, 6])


def start() -> Moe:
    torch.manual_seed(1)
    return sharded(Moe(), shard_fn=place)


def measured(rank: int, disable: list[str]) -> dict[str, Any]:
    model = start()
    return gtp_compile.verify(model, loss, options={"inner": "eager", "disable": disable})(*inputs(rank)).to_dict()


@pytest.mark.parametrize("world", [2, 4])
def test_errors_with_and_without_retyping(world):
    table = run_ranks(measured, world, [])
    for rows in table:  # errors are reduced over ranks: everybody reads the same table
        assert rows == table[0]
    assert [r["leader"] for r in table[0]["groups"]] == GEMMS
    assert [r["leader"] for r in table[0]["others"]] == OTHERS
    for row in table[0]["groups"] + table[0]["others"]:
        assert row["matched"], row
        hops = {row[k] for k in ("gemm_dtype", "scratch_dtype", "wire_dtype", "sum_dtype", "main_grad_dtype")}
        assert hops == {"float32"}, row
        assert row["error"] <= 1e-6, row
    coarse = run_ranks(measured, world, ["retype_wgrads"])[0]
    for row in coarse["groups"]:
        assert (row["gemm_dtype"], row["wire_dtype"], row["main_grad_dtype"]) == ("bfloat16", "bfloat16", "float32")
        assert row["error"] > 1e-3, row


def variant(rank: int, kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Moe()
    if kind == "frozen":
        for name in ("up.weight", "discrete.weight0", "discrete.bias1"):
            model.get_parameter(name).requires_grad_(False)
    sharded(model, shard_fn=place, reduce_op="sum" if kind == "sum" else "avg")
    if kind == "main_grad_bf16":
        for param in model.parameters():
            param.main_grad = param.main_grad.to(BF16)
    look = gtp_compile.verify(model, loss, options={"inner": "eager"})
    if kind == "checkpointed":
        forward = model.forward
        model.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    return look(*inputs(rank)).to_dict()


@pytest.mark.parametrize("kind", ["sum", "frozen", "main_grad_bf16", "checkpointed"])
def test_errors_of_variants(kind):
    table = run_ranks(variant, 2, kind)[0]
    rows = {r["leader"]: r for r in table["groups"] + table["others"]}
    assert set(rows) == {*GEMMS, *OTHERS}
    for name, row in rows.items():
        if kind == "frozen" and name == "up.weight":
            assert (row["kind"], row["error"], row["wire_bytes"]) == ("eager", None, 0)
            assert row["reason"] == "frozen: no gradient, no collective"
        else:
            assert row["matched"], row
            assert row["error"] <= (2.0**-6 if kind == "main_grad_bf16" else 1e-6), row


def exact(rank: int) -> float:
    """Numbers that bfloat16 can't add: 1.0078125 from each of 12 rows and 2 ranks."""
    model = nn.Linear(16, 16, bias=False)
    sharded(model, src_data_rank=0)
    x = torch.full((12, 16), 1.0078125, dtype=BF16)
    step = torch.compile(model, backend="gtp", options={"inner": "eager"})
    y = step(x)
    y.backward(torch.full((12, 16), 1.0078125 if rank == 0 else 1.0, dtype=BF16))
    want = torch.full((16, 16), 12 * 1.0078125 * (1.0078125 + 1.0) / 2, dtype=torch.float64)
    expect("main_grad, to the bit", bool((model.weight.main_grad.double() == want[:8]).all()), True)
    return torch.tensor(want[0, 0].item()).to(BF16).double().item() - want[0, 0].item()


def test_sum_that_bfloat16_can_not_hold():
    assert all(difference != 0 for difference in run_ranks(exact, 2))


def replicated(rank: int) -> None:
    """Gradients of norms, biases and embeddings: each term may come rounded, their sum is float32 all the way."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 16), nn.RMSNorm(16), nn.Linear(16, 32))
    twin = nn.Sequential(nn.Embedding(20, 16), nn.RMSNorm(16), nn.Linear(16, 32)).double()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            ours.copy_(ours.to(BF16))
            theirs.copy_(ours)
    sharded(model)
    tokens = torch.randint(20, (64,), generator=torch.Generator().manual_seed(rank))
    dy = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank)).to(BF16)
    torch.compile(model, backend="gtp", options={"inner": "eager"})(tokens).backward(dy)
    twin(tokens).backward(dy.double())
    names = [n for n, _ in model.named_parameters()]
    for name, param, want in zip(names, model.parameters(), twin.parameters(), strict=True):
        # The whole way to the embedding rounds activations and dx a few times; the bias' terms are dy itself.
        close_main_grad(param, reduced(want.grad), 1e-6 if name == "2.bias" else 2.0**-7)


def test_replicated_parameters_against_a_float64_model():
    run_ranks(replicated, 2)


def untouched(rank: int, main_grad_dtype: torch.dtype | None) -> None:
    torch.manual_seed(1)
    model = sharded(Moe(), shard_fn=place, main_grad_dtype=main_grad_dtype)
    step = torch.compile(model, backend="gtp", options={"inner": "eager"})
    for _ in range(2):
        loss(step(*inputs(rank))).backward()
    model.norm.weight.grad = None  # one that starts from zero at the next step
    before = state(model)
    gtp_compile.verify(model, loss, options={"inner": "eager"})(*inputs(rank))
    gtp_compile.explain(model, loss)(*inputs(rank))
    after = state(model)
    expect("what there is", list(after), list(before))
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        expect(f"{name} is as it was", same, True)
    # And training goes on as if nobody had looked.
    torch.manual_seed(3)
    loss(step(*inputs(rank))).backward()
    fresh = state(model)
    torch.manual_seed(1)
    other = sharded(Moe(), shard_fn=place, main_grad_dtype=main_grad_dtype)
    step = torch.compile(other, backend="gtp", options={"inner": "eager"})
    for _ in range(2):
        loss(step(*inputs(rank))).backward()
    other.norm.weight.grad = None
    torch.manual_seed(3)
    loss(step(*inputs(rank))).backward()
    for name, value in state(other).items():
        if isinstance(value, Tensor) and ".grad" in name:
            expect(f"{name} of an unwatched run", torch.equal(value, fresh[name]), True)


def state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu_rng": torch.get_rng_state(), "python_rng": random.getstate()}
    for name, param in model.named_parameters():
        local = None if param.grad is None else param.grad._local_tensor
        found[f"{name}.values"] = param._local_tensor.clone()
        found[f"{name}.grad.object"] = id(param.grad)
        found[f"{name}.main_grad.object"] = id(param.main_grad)
        found[f"{name}.grad"] = None if local is None else local.clone()
        found[f"{name}.main_grad"] = None if param.main_grad is None else param.main_grad.clone()
    return found | {f"{n}.buffer": b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("main_grad_dtype", [FP32, BF16, None], ids=["fp32", "bf16", "none"])
def test_verify_and_explain_leave_no_trace(main_grad_dtype):
    run_ranks(untouched, 2, main_grad_dtype)


def alone(rank: int) -> list[str]:
    """`explain` on one rank only, while the other does something else: it must not wait for anybody."""
    model = start()
    leaders = [r.leader for r in gtp_compile.explain(model, loss)(*inputs(0)).groups] if rank == 0 else GEMMS
    dist.barrier()
    return leaders


def test_explain_communicates_nothing():
    assert run_ranks(alone, 2, timeout=60.0) == [GEMMS, GEMMS]
