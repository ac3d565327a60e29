"""Layers in the forms in which models write them, trained together on several ranks: one model, one compilation.

A layer is a function of its weights. Its exact gradient is that of the same function in float64, from the same rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dist_helpers import BF16, FP32, close, close_main_grad, compiled, expect, reduced, reductions, spy, world_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import gtp_compile

# Bound for layers in which something between the weights is rounded to bf16; a lost or doubled part is far above.
ROUNDED = 3e-2


@dataclass(frozen=True)
class Layer:
    """A function of weights.

    Attributes:
        weights: shape by name; those called `follower...` are left plain.
        forms: what `verify` says of them, by name; those without are reductions, whose form is of no interest.
        x: shape of the input; letters stand for this rank's counts.
        compute: `(weights, x, at) -> y`; `at` holds `ids i64[S]`, `counts i64[E]` of x's rows (as a list: `splits`) and
            their ends `offs i32[E]`.
        id_range: of the ids.
        is_rounded: whether something between its weights is rounded to the compute dtype.
    """

    name: str
    weights: dict[str, tuple[int, ...]]
    forms: dict[str, str]
    x: tuple[Any, ...]
    compute: Callable[[dict[str, Tensor], Tensor, dict[str, Any]], Tensor]
    id_range: tuple[int, int]
    is_rounded: bool = field(default=False, kw_only=True)

    def inputs(self, sizes: dict[str, Any], generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, dict]:
        x = torch.randn([sizes.get(s, s) for s in self.x], generator=generator).to(dtype)
        ids = torch.randint(*self.id_range, (sizes["S"],), generator=generator)
        splits = sizes.get("splits", [])
        counts = torch.tensor(splits, dtype=torch.int64)
        return x, {"ids": ids, "counts": counts, "splits": splits, "offs": counts.cumsum(0).to(torch.int32)}


def grouped(x: Tensor, weight: Tensor, at: dict[str, Any]) -> Tensor:
    """`torch._grouped_mm` of `x [R, K]` with `weight [E, K, N]`, in float64 the same by a loop."""
    if x.dtype != torch.float64:
        return torch._grouped_mm(x, weight, offs=at["offs"])
    return torch.cat([rows @ w for rows, w in zip(x.split(at["splits"]), weight, strict=True)])


class Unit(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        for name, shape in layer.weights.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, x: Tensor, at: dict[str, Any]) -> Tensor:
        return self.layer.compute({name: getattr(self, name) for name in self.layer.weights}, x, at)


class Model(nn.Module):
    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.units = nn.ModuleDict({layer.name: Unit(layer) for layer in layers})

    def forward(self, inputs: dict[str, tuple[Tensor, Any]]) -> dict[str, Tensor]:
        return {name: unit(*inputs[name]) for name, unit in self.units.items()}


def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate | None:
    """Weights along their last dim but one, biases replicated, followers plain."""
    name = fqn.rpartition(".")[2]
    if name.startswith("follower"):
        return None
    return Replicate() if name == "bias" else Shard(param.ndim - 2)


def train(
    rank: int,
    layers: Sequence[Layer],
    inner: str,
    steps: list[list[dict[str, Any]]],
    dtype: torch.dtype = BF16,
    strict: bool = True,
) -> tuple[int, dict[str, tuple[str, bool, float]]]:
    """Some steps with these sizes of each rank: how many graphs they cost, and what `verify` says of every weight."""
    torch.manual_seed(1)
    model = gtp_compile.shard(Model(layers), world_mesh(), shard_fn=place, param_dtype=dtype)
    step = compiled(model, inner=inner, strict=strict)
    torch._dynamo.utils.counters.clear()
    generator = torch.Generator().manual_seed(rank)
    placed = [p for p in model.parameters() if isinstance(p, DTensor)]
    for of_ranks in steps:
        model.zero_grad()
        inputs = {name: unit.layer.inputs(of_ranks[rank], generator, dtype) for name, unit in model.units.items()}
        with spy() as seen:
            outputs = step(inputs)
            dys = {n: torch.randn(y.shape, generator=generator).to(dtype) for n, y in outputs.items()}
            torch.autograd.backward(list(outputs.values()), list(dys.values()))
        expect("reductions", len(reductions(seen)), len(placed))
        expect("their dtype", {c.dtype for c in reductions(seen)}, {FP32})
        for name, unit in model.units.items():
            check(unit, *inputs[name], dys[name], ROUNDED if unit.layer.is_rounded and dtype != FP32 else 1e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = lambda y: sum(t.float().square().sum() for t in y.values())  # noqa: E731
    found = gtp_compile.verify(model, loss, options={"inner": inner})(inputs)
    return graphs, {r.leader: (r.form, r.matched, r.error) for r in (*found.groups, *found.others)}


def check(unit: Unit, x: Tensor, at: dict[str, Any], dy: Tensor, bound: float) -> None:
    """Every gradient against that of the same layer in float64, with the weights' values as they are computed with."""
    params = dict(unit.named_parameters())
    exact = {n: _whole(p).to(x.dtype).double().requires_grad_() for n, p in params.items()}
    y = unit.layer.compute(exact, x.double(), at)
    for (name, param), want in zip(
        params.items(), torch.autograd.grad(y, list(exact.values()), dy.double()), strict=True
    ):
        if isinstance(param, DTensor):
            close_main_grad(param, reduced(want), bound)
        else:  # a plain follower: this rank's own gradient, in the compute dtype
            close(f"{unit.layer.name}.{name}.grad", param.grad, want, ROUNDED)


def _whole(param: Tensor) -> Tensor:
    param = param.detach()
    return param.full_tensor() if isinstance(param, DTensor) else param
