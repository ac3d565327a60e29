"""A spy on every collective: what is issued, in what dtype and order, and when nothing may be."""

import itertools
from typing import Any

import pytest
import torch
from dist_helpers import (
    BF16,
    FP32,
    Collective,
    close,
    compiled,
    expect,
    no_outstanding_work,
    reductions,
    sharded,
    spy,
    whole,
    world_mesh,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.parameters import ComputeLeaf


class Model(nn.Module):
    """norm (replicated) -> up, down (sharded) -> three experts (one group) and their biases (replicated, one group)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 48, bias=False)
        self.down = nn.Linear(48, 16, bias=False)
        self.experts = GroupedLinear(3, 16, 24)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.experts(self.down(torch.relu(self.up(self.norm(x)))), splits)


NORM, UP, DOWN, EXPERTS, BIASES = 16, 16 * 48, 48 * 16, 3 * 16 * 24, 3 * 24


def inputs(rank: int, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(rank)).to(BF16)
    return x.requires_grad_(), torch.tensor([count // 3, 0, count - count // 3])


def start(**kwargs: Any) -> nn.Module:
    torch.manual_seed(1)
    return sharded(Model(), **kwargs)


Steps = list[tuple[list[Collective], list[Collective]]]


def issued(rank: int, counts: list[list[int]], options: dict[str, Any]) -> Steps:
    """Forward's and backward's collectives, for each step's rows (`counts[step][rank]`)."""
    step = compiled(start(), **options)
    steps = []
    for of_ranks in counts:
        with spy() as forward:
            y = step(*inputs(rank, of_ranks[rank]))
        with spy() as backward:
            y.float().sum().backward()
        steps.append((forward, backward))
    no_outstanding_work()
    return steps


def gathers(*numels: int) -> list[Collective]:
    return [Collective("all_gather", BF16, n) for n in numels]


@pytest.mark.parametrize(
    ("world", "inner"), [(2, "eager"), (4, "eager"), pytest.param(2, "inductor", marks=pytest.mark.slow)]
)
def test_what_a_step_issues(world, inner):
    counts = [[7] * world, [9, 7, 0, 1][:world], [7, 9, 1, 0][:world], [0, 7, 9, 9][:world]]
    ranks = run_ranks(issued, world, counts, {"inner": inner})
    forward, backward = ranks[0][0]
    assert forward == gathers(UP, DOWN, EXPERTS)
    again = [c for c in backward if c.kind == "all_gather"]
    # Backward gathers again what it needs for input gradients: all three.
    assert sorted(again, key=repr) == sorted(gathers(UP, DOWN, EXPERTS), key=repr)
    rest = [c for c in backward if c.kind != "all_gather"]
    assert sorted(rest, key=repr) == sorted(
        [
            Collective("reduce_scatter", FP32, UP),
            Collective("reduce_scatter", FP32, DOWN),
            Collective("reduce_scatter", FP32, EXPERTS),
            Collective("all_reduce", FP32, NORM),
            Collective("all_reduce", FP32, BIASES),
        ],
        key=repr,
    )
    for rank, step in itertools.product(range(world), range(len(counts))):
        assert ranks[rank][step] == (forward, backward), f"rank {rank}, step {step}, rows {counts[step][rank]}"


def wires(rank: int) -> dict[str, list[Collective]]:
    """Dtypes on the wire of a dense layer and a group, by who has which main_grad."""
    found = {}
    for case, (leader, follower) in {
        "all": (FP32, FP32),
        "leader alone": (FP32, None),
        "followers alone": (None, FP32),
        "nobody": (None, None),
        "leader bf16": (BF16, FP32),
    }.items():
        torch._dynamo.reset()
        model = start()
        for name, param in model.named_parameters():
            dtype = follower if name.endswith(("weight1", "weight2", "bias1", "bias2")) else leader
            param.main_grad = None if dtype is None else torch.zeros(param.leaf.shape, dtype=dtype)
        with spy() as seen:
            compiled(model)(*inputs(rank, 7)).float().sum().backward()
        found[case] = reductions(seen)
    return found


def test_wire_is_float32_exactly_when_the_leader_has_a_float32_main_grad():
    first, second = run_ranks(wires, 2)
    assert first == second
    for case, seen in first.items():
        assert {c.dtype for c in seen} == {FP32 if case in ("all", "leader alone") else BF16}, case
        assert sorted(c.numel for c in seen) == sorted([NORM, UP, DOWN, EXPERTS, BIASES]), case


def touched(rank: int) -> None:
    model = start()
    full = {n: whole(p, p.detach()) for n, p in model.named_parameters()}
    with spy() as seen:
        for _, module in model.named_modules():
            for name in list(module._parameters):
                weight = getattr(module, name)
                if weight is None:
                    continue
                expect(f"{name} outside forward", isinstance(weight, DTensor), True)
                expect(f"{name} is the registered parameter", weight is module._parameters[name], True)
                _ = weight.shape, weight.dtype, weight.device, weight.grad, weight.main_grad, weight.is_leaf
                _ = weight.numel(), weight.stride(), weight.requires_grad, weight.placements, repr(type(weight))
                weight.requires_grad_(False)
                weight.requires_grad_(True)
        model.requires_grad_(False).requires_grad_(True)
        _ = model.get_parameter("experts.weight1"), list(model.named_parameters()), list(model.parameters())
        _ = model.state_dict(), str(model), model.train(), model.eval(), model.zero_grad(), dir(model.up)
        _ = hasattr(model.up, "weight"), sum(p.numel() for p in model.parameters())
        torch.optim.AdamW(model.parameters())
    expect("collectives", seen, [])
    with spy() as seen:
        nn.init.zeros_(model.up.weight)
        nn.init.constant_(model.experts.weight1, 2.0)
        nn.init.ones_(model.norm.weight)
        with torch.no_grad():
            model.down.weight.mul_(3.0)
            model.experts.weight0.copy_(model.experts.weight1)
    expect("collectives of nn.init", seen, [])
    leaves = {n: p.leaf for n, p in model.named_parameters()}
    expect("up", bool(leaves["up.weight"].any()), False)
    expect("weight1", bool((leaves["experts.weight1"] == 2).all()), True)
    expect("weight0", bool((leaves["experts.weight0"] == 2).all()), True)
    close("down", whole(model.down.weight, model.down.weight.detach()), 3 * full["down.weight"])


def test_attributes_and_inits_outside_forward_communicate_nothing():
    run_ranks(touched, 2)


class Asks(nn.Linear):
    """x [R, 16] -> [R, 8], through a weight that it looks for first."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() if hasattr(self, "weight") else x


def asked(rank: int) -> list[str]:
    step = compiled(sharded(Asks(16, 8, bias=False)))
    issued = []
    for _ in range(2):
        with spy() as seen:
            step(torch.ones(4, 16, dtype=BF16)).sum().backward()
        issued.append(repr(seen))
    return issued


def test_an_attribute_that_dynamo_guards_on_is_not_gathered():
    """Compiling communicates nothing: a rank that compiles once more than the others would wait for them for ever."""
    for compiling, compiled_before in run_ranks(asked, 2):
        assert compiling == compiled_before


def initialised(rank: int) -> None:
    model = start()
    whole_weight = torch.zeros(48, 16)
    for param in (whole_weight, model.up.weight):
        torch.manual_seed(5)
        nn.init.normal_(param, std=0.5)
    up = whole(model.up.weight, model.up.weight.detach())
    # A stock DTensor would draw the same numbers on every rank of a CPU mesh.
    expect("what the whole weight gets", torch.equal(up, whole_weight.double()), True)
    expect("spread", 0.4 < up.std().item() < 0.6, True)
    computed = compiled(model.up)(torch.eye(16, dtype=BF16)).t()
    expect("forward computes with the new values", torch.equal(computed.double(), up.to(BF16).double()), True)


def test_seeded_init_is_that_of_the_whole_weight():
    run_ranks(initialised, 2)


def saved(rank: int, inner: str) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """What forward saves for backward: kind, shape and dtype."""
    model = start()
    run = compiled(model, inner=inner)
    shards = {p.leaf.untyped_storage().data_ptr() for p in model.parameters()}
    main_grads = {p.main_grad.untyped_storage().data_ptr() for p in model.parameters()}
    found = []

    def pack(t: Tensor) -> Tensor:
        address = t.untyped_storage().data_ptr()
        kind = "shard" if address in shards else "main_grad" if address in main_grads else "other"
        found.append((kind, tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(*inputs(rank, 7))
    return found


FULL = {UP, DOWN, EXPERTS, 16 * 24}  # sizes of full sharded weights and of a group's; no activation of 7 rows has one


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forward_saves_shards_and_activations_only(inner):
    found = run_ranks(saved, 2, inner)[0]
    assert sum(kind == "shard" for kind, _, _ in found) >= 5, found
    for kind, shape, dtype in found:
        numel = torch.Size(shape).numel()
        if kind == "other":
            assert numel not in FULL, f"forward keeps {dtype}{list(shape)}, the size of a gathered weight"


def idle(rank: int) -> None:
    """With one rank in the mesh, or under no_grad: no reduction."""
    model = start()
    step = compiled(model)
    with torch.no_grad(), spy() as seen:
        step(*inputs(rank, 7))
    expect("collectives of an evaluation", seen, gathers(UP, DOWN, EXPERTS))
    no_outstanding_work()


def test_evaluation_only_gathers():
    run_ranks(idle, 2)


def third_party(rank: int) -> None:
    """The compute leaf as another library sees it: a `DistributedWeight`, whose hooks are called by hand."""
    torch.manual_seed(1)
    model = GroupedLinear(3, 16, 8, bias=False)
    full = [p.detach().clone() for p in model.parameters()]
    gtp_compile.shard(model, world_mesh(), param_dtype=BF16)
    leader = model.weight0.leaf
    expect("type", (isinstance(leader, ComputeLeaf), isinstance(leader, gtp_compile.DistributedWeight)), (True, True))
    members = [p.leaf for p in model.parameters()]
    for materialize in (gtp_compile.materialize_weight_for_forward, gtp_compile.materialize_weight_for_backward):
        with spy() as seen:
            got = materialize(members)
        expect("one gather for the group", seen, gathers(3 * 16 * 8))
        for one, want in zip(got, full, strict=True):
            expect("a full weight", torch.equal(one, want.to(BF16)), True)
    expect("dtype rule", gtp_compile.weight_grad_dtype(members, BF16), FP32)
    buffers = gtp_compile.weight_grad_buffers(members, (8, 16), BF16, "cpu")
    g = torch.Generator().manual_seed(rank)
    for buffer in buffers:
        expect("buffer", (buffer.dtype, tuple(buffer.shape)), (FP32, (8, 16)))
        buffer.copy_(torch.randn(8, 16, generator=g))
    with spy() as seen:
        returned = gtp_compile.finalize_weight_grads(members, buffers)
    expect("nothing is left for autograd", returned, [None] * 3)
    expect("one reduction for the group", seen, [Collective("reduce_scatter", FP32, 3 * 16 * 8)])
    for param, buffer in zip(model.parameters(), buffers, strict=True):
        want = buffer.double()
        torch.distributed.all_reduce(want)
        close("main_grad", whole(param, param.main_grad), want / 2)
        expect(".grad is over it", param.grad._local_tensor.data_ptr(), param.main_grad.data_ptr())


def test_leaf_serves_third_parties():
    run_ranks(third_party, 2)
