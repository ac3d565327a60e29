"""Compile the whole model, each layer, or only the MoE block; and weights that come into a graph from outside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import (
    BF16,
    FP32,
    close_main_grad,
    compiled,
    double_leaf,
    expect,
    grouped64,
    linear64,
    reduced,
    reductions,
    sharded,
    spy,
)
from ranks import run_ranks
from torch import Tensor, nn
from uneven import SPLITS, Warned, along_out, loss, mesh_of, rows, start

import gtp_compile
from gtp_compile import GroupedLinear


class Moe(nn.Module):
    """x bf16[9, 16], splits -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = GroupedLinear(3, 16, 13, bias=False), GroupedLinear(3, 13, 16, bias=False)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x, splits)), splits)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.moe = nn.Linear(16, 16, bias=False), Moe()

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return x + self.moe(self.dense(x), splits)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, splits)
        return x


def compile_whole(model: Model) -> Any:
    return compiled(model)


def compile_layers(model: Model) -> Any:
    for layer in model.layers:
        layer.compile(backend="gtp", fullgraph=True, options={"inner": "eager"})
    return model


def compile_moe(model: Model) -> Any:
    for layer in model.layers:
        layer.moe.compile(backend="gtp", fullgraph=True, options={"inner": "eager"})
    return model


def compile_nothing(model: Model) -> Any:
    return model


WAYS: dict[str, Callable[[Model], Any]] = {
    "whole": compile_whole, "layers": compile_layers, "moe": compile_moe, "eager": compile_nothing
}  # fmt: skip


def exact(model: Model) -> dict[str, Tensor]:
    return {n: double_leaf(p) for n, p in model.named_parameters()}


def forward64(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in range(2):
        y = linear64(x, leaves[f"layers.{i}.dense.weight"])
        for part in ("up", "down"):
            weight = torch.stack([leaves[f"layers.{i}.moe.{part}.weight{e}"] for e in range(3)])
            y = grouped64(torch.relu(y) if part == "down" else y, weight, list(SPLITS))
        x = x + y
    return x


def trained(rank: int, shape: tuple[int, ...]) -> None:
    """Gradients of each way against the exact ones, and against each other."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, way in WAYS.items():
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Model()
        leaves = exact(model)
        gtp_compile.shard(model, mesh_of(*shape), shard_fn=along_out, param_dtype=BF16)
        run = way(model)
        for i in range(2):
            with spy() as seen, Warned() as texts:
                loss(run(*rows(rank, i))).backward()
            expect(f"{name}: dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
            loss(forward64(leaves, rows(rank, i)[0])).backward()
            in_eager = {"whole": 0, "layers": 0, "moe": 2, "eager": 6}[name]
            # Outside compiled graphs the GEMM's result is rounded before the sum: said once for each group.
            expect(
                f"{name}: warnings",
                len([t for t in texts if "was rounded to torch.bfloat16" in t]),
                in_eager if i == 0 else 0,
            )
        found[name] = {}
        for fqn, param in model.named_parameters():
            rounded = name == "eager" or (name == "moe" and "dense" in fqn)
            close_main_grad(param, reduced(leaves[fqn].grad), 2.0**-8 if rounded else 1e-6)
            found[name][fqn] = param.main_grad.clone()
        expect("keys", list(model.state_dict()), list(leaves))
    for fqn, grad in found["whole"].items():
        expect(f"{fqn}: whole and each layer, to the bit", torch.equal(grad, found["layers"][fqn]), True)
        if "moe" in fqn:
            expect(f"{fqn}: only the MoE block, to the bit", torch.equal(grad, found["moe"][fqn]), True)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works(
    "compile the whole model, each layer, the MoE block only, nothing",
    "same gradients, float32 on the wire; GEMMs in eager round first, and warn once a weight",
)
def test_every_way_to_compile_gives_the_same_gradients(shape):
    run_ranks(trained, 4, shape)


class Functional(nn.Module):
    """Weights are read in eager, and handed to a compiled function: GEMM and gather lie in different graphs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 13, bias=False), nn.Linear(13, 16, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.up.weight, self.down.weight)


def two_layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(torch.relu(F.linear(x, up)), down)


def passed(rank: int, backend: str) -> None:
    torch.manual_seed(1)
    options = {"inner": "eager"} if backend == "gtp" else {}
    function = torch.compile(two_layers, backend=backend, fullgraph=True, **({"options": options} if options else {}))
    model = Functional(function)
    up, down = double_leaf(model.up.weight), double_leaf(model.down.weight)
    sharded(model, shard_fn=along_out)
    with Warned() as texts:
        for i in range(3):
            with spy() as seen:
                loss(model(rows(rank, i)[0])).backward()
            expect("dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
            loss(linear64(torch.relu(linear64(rows(rank, i)[0], up)), down)).backward()
    close_main_grad(model.up.weight, reduced(up.grad), 2.0**-7)
    close_main_grad(model.down.weight, reduced(down.grad), 2.0**-7)
    for name in ("up.weight", "down.weight"):
        found = [t for t in texts if t.startswith(f"{name}: its weight gradient was rounded to torch.bfloat16")]
        expect(f"warnings about {name}", len(found), 1)
    expect("warnings", len(texts), 2)


@pytest.mark.parametrize("backend", ["gtp", "aot_eager"])
@pytest.mark.works(
    "weights handed to a compiled function", "float32 on the wire, one warning a weight that its GEMM rounded"
)
def test_weights_that_are_arguments_of_a_compiled_function(backend):
    run_ranks(passed, 2, backend)


class Broken(nn.Module):
    """Gather before a graph break, GEMM behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        torch._dynamo.graph_break()
        return F.linear(x, weight)


def broken(rank: int) -> None:
    torch.manual_seed(1)
    model = Broken()
    up = double_leaf(model.up.weight)
    sharded(model, shard_fn=along_out)
    step = compiled(model, fullgraph=False)
    with Warned() as texts:
        for i in range(3):
            with spy() as seen:
                loss(step(rows(rank, i)[0])).backward()
            expect("dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
            loss(linear64(rows(rank, i)[0], up)).backward()
    close_main_grad(model.up.weight, reduced(up.grad), 2.0**-7)
    expect("one warning with the name", [t.partition(":")[0] for t in texts], ["up.weight"])


@pytest.mark.works("a graph break between gather and GEMM", "the same")
def test_gather_and_gemm_in_different_graphs():
    run_ranks(broken, 2)


def silent(rank: int) -> None:
    """Whole model compiled: nothing is rounded, nothing is said."""
    model, _ = start((2,))
    with Warned() as texts:
        for i in range(2):
            loss(compiled(model)(*rows(rank, i))).backward()
    expect("warnings", texts, [])


def test_no_warning_where_nothing_is_rounded():
    run_ranks(silent, 2)
