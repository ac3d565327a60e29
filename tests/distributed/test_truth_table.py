"""The dtype rule as a table: protocol x main_grad x layout x compute dtype x opt-in, each as it runs on two ranks.

All units of one compute dtype stand in one model, so they cost one compilation. Their sizes are distinct, by which the
spy knows whose collective it sees.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dist_helpers import BF16, FP16, FP32, compiled, error, reduced, reductions, spy, whole, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.parameters import ShardedParameter

PROTOCOLS = ("plain", "distributed", "leader_only")
MAIN_GRADS = ("absent", "none", "bf16", "fp32")
LAYOUTS = ("stacked", "discrete", "bare")
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
EXPERTS = {"stacked": 2, "discrete": 3, "bare": 1}
PRIMES = [p for p in range(5, 200) if all(p % q for q in range(2, p))]
IN = 8
SPLITS = {1: [12], 2: [5, 7], 3: [6, 0, 6]}  # rows of each expert


@dataclass(frozen=True)
class Unit:
    """One weight group. `compute` is the dtype of activations, `shard` that of placed parameters."""

    protocol: str
    main_grad: str
    layout: str
    out: int

    @property
    def name(self) -> str:
        return f"{self.protocol}-{self.main_grad}-{self.layout}"

    @property
    def experts(self) -> int:
        return EXPERTS[self.layout]

    @property
    def placed(self) -> int:
        """How many members `shard` places."""
        return {"plain": 0, "distributed": self.weights, "leader_only": 1}[self.protocol]

    @property
    def weights(self) -> int:
        return 3 if self.layout == "discrete" else 1

    def build(self, compute: torch.dtype, shard: torch.dtype) -> nn.Module:
        dtype = compute if self.protocol == "plain" else shard
        if self.layout == "bare":
            return nn.Linear(IN, self.out, bias=False, dtype=dtype)
        unit = GroupedLinear(
            self.experts, IN, self.out, bias=False, dtype=dtype, single_grouped_weight=self.layout == "stacked"
        )
        for follower in list(unit.parameters())[1:]:
            if self.protocol == "leader_only":  # plain followers are computed with as they are
                follower.data = follower.data.to(compute)
        return unit


UNITS = [
    Unit(protocol, main_grad, layout, 2 * PRIMES[i])
    for i, (protocol, main_grad, layout) in enumerate(itertools.product(PROTOCOLS, MAIN_GRADS, LAYOUTS))
]


class Table(nn.Module):
    def __init__(self, compute: torch.dtype, shard: torch.dtype) -> None:
        super().__init__()
        # Two halves, because `shard` attaches main_grad to all of a model or to none.
        self.absent = nn.ModuleDict({u.name: u.build(compute, shard) for u in UNITS if u.main_grad == "absent"})
        self.attached = nn.ModuleDict({u.name: u.build(compute, shard) for u in UNITS if u.main_grad != "absent"})

    def unit(self, unit: Unit) -> nn.Module:
        return (self.absent if unit.main_grad == "absent" else self.attached)[unit.name]

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.unit(u)(x) if u.layout == "bare" else self.unit(u)(x, SPLITS[u.experts]) for u in UNITS]


def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | None:
    protocol = fqn.partition("-")[0]
    follower = fqn.endswith(("weight1", "weight2"))
    if protocol == "plain" or (protocol == "leader_only" and follower):
        return None
    return Shard(param.ndim - 2)


def attach(table: Table, unit: Unit) -> None:
    dtype = DTYPES.get(unit.main_grad)
    for param in table.unit(unit).parameters():
        local = param.leaf if isinstance(param, ShardedParameter) else param
        if unit.main_grad != "absent":
            param.main_grad = None if dtype is None else torch.zeros_like(local, dtype=dtype).detach()


def observed(rank: int, compute: str, shard: str, options: dict[str, bool]) -> dict[str, Any]:
    """What one step does to every unit, and what `explain` says of it."""
    torch.manual_seed(1)
    table = Table(DTYPES[compute], DTYPES[shard])
    for half, dtype in ((table.absent, None), (table.attached, FP32)):
        gtp_compile.shard(half, world_mesh(), shard_fn=place, param_dtype=DTYPES[compute], main_grad_dtype=dtype)
    for unit in UNITS:
        attach(table, unit)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(12, IN, generator=g).to(DTYPES[compute])
    dys = [torch.randn(12, u.out, generator=g).to(DTYPES[compute]) for u in UNITS]
    with spy() as seen:
        torch.autograd.backward(compiled(table, **options)(x), dys)
    wire = {c.numel: str(c.dtype).removeprefix("torch.") for c in reductions(seen)}
    assert len(wire) == len(reductions(seen)), "two collectives of one size"
    asked = rank == 0 and not options  # explain never communicates, so one rank may ask alone
    rows = {r.leader: r for r in gtp_compile.explain(table)(x).groups} if asked else {}
    result: dict[str, Any] = {"reductions": len(reductions(seen))}
    for unit, dy in zip(UNITS, dys, strict=True):
        result[unit.name] = describe(unit, table.unit(unit), x, dy, wire)
        row = rows.get(f"{unit.name}.{'weight0' if unit.layout == 'discrete' else 'weight'}")
        result[unit.name]["row"] = row and {k: v for k, v in row.to_dict().items() if k.endswith("dtype")}
    return result


def describe(unit: Unit, module: nn.Module, x: Tensor, dy: Tensor, wire: dict[int, str]) -> dict[str, Any]:
    wanted = [
        b.double().t() @ a.double()
        for a, b in zip(x.split(SPLITS[unit.experts]), dy.split(SPLITS[unit.experts]), strict=True)
    ]
    if unit.layout == "stacked":
        wanted = [torch.stack(wanted)]
    members = []
    for param, want in zip(module.parameters(), wanted, strict=True):
        main_grad, grad = getattr(param, "main_grad", None), param.grad
        placed = isinstance(param, ShardedParameter)
        added = placed or getattr(param, "grad_added_to_main_grad", False)
        kept = main_grad if added and main_grad is not None else grad
        members.append(
            {
                "placed": placed,
                "grad": grad_kind(grad, main_grad),
                "grad_dtype": None if grad is None else grad.dtype,
                "main_grad_dtype": None if main_grad is None else main_grad.dtype,
                "main_grad_changed": None if main_grad is None else bool(main_grad.any()),
                "error": error(whole(param, kept), reduced(want)) if placed else error(kept, want),
                "bytes": None if kept is None else getattr(kept, "_local_tensor", kept).double().numpy().tobytes(),
            }
        )
    return {"members": members, "wire": wire.get(unit.placed * (2 if unit.layout == "stacked" else 1) * unit.out * IN)}


def grad_kind(grad: Tensor | None, main_grad: Tensor | None) -> str:
    if grad is None:
        return "None"
    if not isinstance(grad, DTensor):
        return "plain tensor"
    shared = main_grad is not None and grad._local_tensor.data_ptr() == main_grad.data_ptr()
    return "DTensor over main_grad" if shared else "DTensor of its own"


# Largest error of one step, by the dtype of the gradient: a few roundings of it.
BOUND = {FP32: 1e-6, FP16: 2.0**-9, BF16: 2.0**-6}
CONFIGS = [
    pytest.param("bf16", "fp32", id="bf16_from_fp32_shards", marks=pytest.mark.long),
    pytest.param("bf16", "bf16", id="bf16_from_bf16_shards"),
    pytest.param("fp16", "fp32", id="fp16_from_fp32_shards", marks=pytest.mark.long),
    pytest.param("fp16", "fp16", id="fp16_from_fp16_shards", marks=pytest.mark.long),
    pytest.param("fp32", "fp32", id="fp32_from_fp32_shards", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("compute", "shard"), CONFIGS)
def test_truth_table(compute, shard, subtests):
    off = run_ranks(observed, 2, compute, shard, {})
    on = run_ranks(observed, 2, compute, shard, {"accumulate_into_main_grad": True})
    assert off[0]["reductions"] == sum(u.placed > 0 for u in UNITS) == on[0]["reductions"]
    for unit in UNITS:
        with subtests.test(unit.name):
            for rank in (0, 1):
                check(unit, DTYPES[compute], DTYPES[shard], off[rank][unit.name], explained=rank == 0)
                check_opt_in(unit, on[rank][unit.name], off[rank][unit.name])


def check_opt_in(unit: Unit, on: dict[str, Any], off: dict[str, Any]) -> None:
    """`accumulate_into_main_grad` changes no distributed weight by a bit; plain ones with a main_grad have it there."""
    attached = DTYPES.get(unit.main_grad)
    assert on["wire"] == off["wire"]
    for i, (member, before) in enumerate(zip(on["members"], off["members"], strict=True)):
        if member["placed"] or attached is None:
            assert member == before
        else:
            assert member["main_grad_changed"] == (SPLITS[unit.experts][i] > 0)
            assert member["error"] <= BOUND[attached]


def check(unit: Unit, compute: torch.dtype, shard: torch.dtype, got: dict[str, Any], explained: bool) -> None:
    attached = DTYPES.get(unit.main_grad)
    rule = attached or compute
    name = str(rule).removeprefix("torch.")
    if unit.protocol == "plain":
        assert got["wire"] is None
        assert got["row"] is None
    else:
        assert got["wire"] == name
        assert not explained or got["row"] == {
            # A GEMM that computes wider than the rule asks stays as it is; its result is cast once.
            "gemm_dtype": "float32" if compute == FP32 else name,
            "scratch_dtype": name,
            "wire_dtype": name,
            "sum_dtype": name,
            "main_grad_dtype": attached and name,
        }
    for i, member in enumerate(got["members"]):
        placed = i < unit.placed
        assert member["placed"] == placed
        assert member["main_grad_dtype"] == attached
        if placed:
            kinds = {None: "DTensor of its own", shard: "DTensor over main_grad"}
            kind = kinds.get(attached, "None")
            assert member["grad"] == kind
            assert member["grad_dtype"] == (None if kind == "None" else shard)
            assert member["main_grad_changed"] == (None if attached is None else SPLITS[unit.experts][i] > 0)
            # Without a main_grad, what was summed in the compute dtype is kept in the shard's.
            assert member["error"] <= BOUND[rule]
        else:
            assert member["grad"] == "plain tensor"
            assert member["grad_dtype"] == compute
            assert member["main_grad_changed"] == (None if attached is None else False)
            assert member["error"] <= BOUND[compute]
