"""Weights that don't divide by the ranks: every rank holds its logical rows, and nobody ever sees padding."""

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
    whole,
    world_mesh,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from uneven import SPLITS, Tied, Uneven, along_out, local_rows, loss, rows, start

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.parameters import like

SIZES = {"wide.weight": 13, "few.weight": 5, "one.weight": 1, "experts.weight0": 7, "stacked.weight": 6}


def trained(rank: int, world: int, inner: str) -> list[str]:
    """Three steps of stock AdamW with clipping, against the twin's; the collectives of the last one."""
    model, twin = start((world,))
    step = compiled(model, inner=inner)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.masters.values(), lr=1e-2)
    for i in range(3):
        ours.zero_grad()
        with spy() as seen:
            loss(step(*rows(rank, i))).backward()
        want = twin.gradients(rows(rank, i)[0])
        for name, param in model.named_parameters():
            # Inductor fuses the activations' roundings away; the twin has them.
            close_main_grad(param, want[name], 1e-6 if inner == "eager" else 2.0**-7)
            expect(f"{name}: dtype of main_grad", param.main_grad.dtype, FP32)
        expect("dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        want_total = torch.nn.utils.clip_grad_norm_(twin.masters.values(), 0.5)
        close("norm", total, want_total, 1e-6 if inner == "eager" else 2.0**-7)
        ours.step()
        theirs.step()
        for name, param in model.named_parameters():
            close(f"step {i}: {name}", whole(param, param), twin.masters[name], 1e-5 if inner == "eager" else 1e-2)
    no_outstanding_work()
    return [repr(c) for c in seen]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.works("sizes that don't divide, fewer rows than ranks, one row", "gradients as without sharding")
def test_training_equals_the_unsharded_twin(world):
    seen = run_ranks(trained, world, world, "eager")
    assert all(s == seen[0] for s in seen), "ranks differ in shapes, never in collectives"


def test_training_through_inductor():
    """The last rank holds no row of `one`, and fewer of the others."""
    run_ranks(trained, 2, 2, "inductor")


def visible(rank: int, world: int) -> None:
    model, twin = start((world,))
    optimizer = torch.optim.AdamW(model.parameters())
    loss(compiled(model)(*rows(rank))).backward()
    optimizer.step()
    saved = model.state_dict()
    for name, param in model.named_parameters():
        full = twin.masters[name].shape
        local = list(full)
        if isinstance(param.placements[0], Shard):
            dim = param.placements[0].dim
            local[dim] = local_rows(full[dim], world, rank)
        state = optimizer.state[param]
        for what, value in {
            "parameter": param,
            "grad": param.grad,
            "state_dict": saved[name],
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }.items():
            expect(f"{name}: {what}, global", (isinstance(value, DTensor), value.shape), (True, full))
            expect(f"{name}: {what}, local", list(value.to_local().shape), local)
            expect(f"{name}: {what}, whole", value.full_tensor().shape, full)
        expect(f"{name}: numel", param.numel(), full.numel())
        expect(f"{name}: leaf", list(param.leaf.shape), local)
        expect(f"{name}: main_grad", list(param.main_grad.shape), local)
        expect(f"{name}: contiguous", param.leaf.is_contiguous() and param.main_grad.is_contiguous(), True)
        expect(f"{name}: memory", param.leaf.untyped_storage().nbytes(), param.leaf.nbytes)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.works(
    "`state_dict`, norms, optimizer state of uneven weights", "logical shapes, ranks without rows hold none"
)
def test_padding_is_never_visible(world):
    run_ranks(visible, world, world)


def values(rank: int, world: int, src: int | None) -> None:
    torch.manual_seed(1 if src is None else rank)
    model = Uneven()
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    if src is not None:
        for value in want.values():
            dist.broadcast(value, src)
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out, src_data_rank=src)
    for name, param in model.named_parameters():
        expect(f"{name}: whole", torch.equal(param.full_tensor(), want[name]), True)
        expect(f"{name}: in forward", torch.equal(param.leaf.materialize_group_for_forward()[0], first_of(param)), True)


def first_of(param: nn.Parameter) -> Tensor:
    """The whole weight, of the leader of its group."""
    return param.leaf.group[0].registered.full_tensor()


@pytest.mark.parametrize("src", [None, 0, 3])
def test_every_rank_gets_its_rows_of_the_source(src):
    run_ranks(values, 4, 4, src)


class Stack(nn.Module):
    """Three experts, stacked as [E, N, K] or [E, K, N], through torch's grouped GEMM (rows of 16 bytes)."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.transposed = transposed

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        weight = self.weight if self.transposed else self.weight.transpose(-2, -1)
        return torch._grouped_mm(x, weight, offs=offs)


def stacks(rank: int, dim: int, transposed: bool) -> None:
    torch.manual_seed(1)
    model = Stack(transposed)
    twin = double_leaf(model.weight)
    sharded(model, shard_fn=lambda f, m, p: Shard(dim))
    x, _ = rows(rank)
    offs = torch.tensor(SPLITS).cumsum(0).to(torch.int32)
    loss(compiled(model)(x, offs)).backward()
    loss(grouped64(x, twin.transpose(-2, -1) if transposed else twin, list(SPLITS))).backward()
    close_main_grad(model.weight, reduced(twin.grad))


@pytest.mark.parametrize("transposed", [False, True], ids=["stored_as_NK", "stored_as_KN"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacked_experts_along_any_dim(dim, transposed):
    """3 = 1 + 1 + 1 + 0 on four ranks; 16 = 6 + 6 + 4 on three."""
    run_ranks(stacks, 4 if dim == 0 else 3, dim, transposed)


def grouped(rank: int, stacked: bool, frozen: int | None, leader_only: bool) -> None:
    """GroupedLinear of 13 rows each: all placed, one frozen, or the leader alone placed."""
    torch.manual_seed(1)
    model = GroupedLinear(3, 16, 13, bias=False, single_grouped_weight=stacked, dtype=BF16 if leader_only else None)
    twins = [double_leaf(p) for p in model.parameters()]
    if frozen is not None:
        model.get_parameter(f"weight{frozen}").requires_grad_(False)
    place = (lambda f, m, p: Shard(0) if f == "weight0" else None) if leader_only else along_out
    gtp_compile.shard(model, world_mesh(), shard_fn=place, param_dtype=BF16)
    x, splits = rows(rank)
    with spy() as seen:
        loss(compiled(model)(x, splits)).backward()
    loss(grouped64(x, twins[0] if stacked else torch.stack(twins), list(SPLITS))).backward()
    expect("reductions", len(reductions(seen)), 1)
    for i, (param, twin) in enumerate(zip(model.parameters(), twins, strict=True)):
        if i == frozen:
            expect("a frozen member's main_grad", bool(param.main_grad.any()), False)
        elif leader_only and i:  # nothing reduces what was not placed
            close(f"follower {i}", param.grad, twin.grad, 2.0**-8)
        else:
            close_main_grad(param, reduced(twin.grad))


@pytest.mark.parametrize(
    ("stacked", "frozen", "leader_only"),
    [(False, None, False), (True, None, False), (False, 1, False), (False, 0, False), (False, None, True)],
    ids=["all", "stacked", "frozen_member", "frozen_leader", "leader_only"],
)
def test_grouped_linear(stacked, frozen, leader_only):
    run_ranks(grouped, 4, stacked, frozen, leader_only)


def tied(rank: int) -> None:
    torch.manual_seed(1)
    model = Tied(13, bias=True)
    weight, bias = double_leaf(model.head.weight), double_leaf(model.head.bias)
    sharded(model, shard_fn=along_out)
    expect("rows", len(model.head.weight.leaf), local_rows(13, 4, rank))
    expect("bias", (model.head.bias.placements, model.head.bias.leaf.shape), ((Replicate(),), (13,)))
    tokens = torch.randint(13, (12,), generator=torch.Generator().manual_seed(rank))
    with spy() as seen:
        loss(compiled(model)(tokens)).backward()
    expect("one reduction for both uses, one for the bias", len(reductions(seen)), 2)
    loss(linear64(weight[tokens].to(BF16), weight, bias)).backward()
    close_main_grad(model.head.weight, reduced(weight.grad), 2.0**-8)  # the embedding's part comes rounded
    close_main_grad(model.head.bias, reduced(bias.grad))


def test_tied_weights():
    run_ranks(tied, 4)


def eager(rank: int, shape: tuple[int, ...]) -> None:
    """Never compiled: each use gathers and reduces by itself, its gradient rounded as eager rounds it."""
    model, twin = start(shape)
    for i in range(2):
        model.zero_grad()
        loss(model(*rows(rank, i))).backward()
        want = twin.gradients(rows(rank, i)[0])
        for name, param in model.named_parameters():
            close_main_grad(param, want[name], 2.0**-8)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_training_in_eager(shape):
    run_ranks(eager, 4, shape)


def orthogonal(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def with_gradients() -> tuple[Uneven, dict[str, Tensor]]:
    """The model and its twin's masters, with the same random gradients of full rank."""
    model, twin = start((4,))
    for name, param in model.named_parameters():
        master = twin.masters[name]
        master.grad = torch.randn(master.shape)
        param.main_grad.copy_(param.leaf.mesh_layout.part(master.grad, param.leaf.shard_rank))
        param.grad = like(param, param.main_grad)
    return model, twin.masters


def whole_matrix_step(rank: int) -> None:
    """An optimizer that needs whole matrices reads them with full_tensor(), and writes the update back with copy_."""
    model, masters = with_gradients()
    for name, master in masters.items():
        param = model.get_parameter(name)
        if param.ndim == 2:
            update = orthogonal(param.grad.full_tensor())
            expect(f"{name}: gradient", update.shape, master.shape)
            with torch.no_grad():
                param.copy_(param.full_tensor() - 0.1 * update)
            close(name, whole(param, param), master.detach() - 0.1 * orthogonal(master.grad), 1e-4)


@pytest.mark.works("`full_tensor()` in whole-matrix optimizers (Muon)", "the logical matrix")
def test_an_operation_on_whole_matrices_sees_no_padding():
    run_ranks(whole_matrix_step, 4)


def muon(rank: int) -> None:
    model, masters = with_gradients()
    # DTensor itself can't add to one row in place what was made of it: any Muon over a stock DTensor raises, too.
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and p.shape[0] > 1}
    before = {n: masters[n].detach().clone() for n in matrices}
    torch.optim.Muon(matrices.values(), lr=0.1).step()
    torch.optim.Muon([masters[n] for n in matrices], lr=0.1).step()
    for name, param in matrices.items():  # its orthogonalization runs in bfloat16
        close(f"{name}: step", whole(param, param) - before[name], masters[name].detach() - before[name], 2e-2)


def test_stock_muon():
    run_ranks(muon, 4)


def explained(rank: int, world: int) -> tuple[dict, dict]:
    model, _ = start((world,))
    found = gtp_compile.verify(model, loss, options={"inner": "eager"})(*rows(rank)).to_dict()
    return found, gtp_compile.explain(model, loss, options={"inner": "eager"})(*rows(rank)).to_dict()


@pytest.mark.parametrize("world", [2, 4])
def test_verify_and_explain(world):
    results = run_ranks(explained, world, world)
    assert all(r[0] == results[0][0] for r in results)
    for rows_ in results[0]:
        found = {r["leader"]: r for r in rows_["groups"]}
        assert set(found) == set(SIZES)
        for leader, row in found.items():
            size = SIZES[leader]
            assert row["matched"] and row["wire_dtype"] == "float32"
            assert "Mod(-N, W)" in row["wire_formula"]
            others = {
                "wide.weight": 16,
                "few.weight": 13,
                "one.weight": 5,
                "experts.weight0": 3 * 16,
                "stacked.weight": 3 * 16,
            }
            padded = -(-size // world) * world
            assert row["wire_bytes"] == 4 * padded * others[leader] * (world - 1) // world
            assert row["error"] is None or row["error"] < 1e-6
    assert all(r["error"] is not None for r in results[0][0]["groups"] + results[0][0]["others"])
