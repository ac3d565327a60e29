"""Equal layers share one compilation and stay themselves; two models in one process do not meet."""

from typing import Any
from unittest import mock

import torch
from dist_helpers import BF16, FP32, close_main_grad, double_leaf, expect, linear64, reduced, reductions, sharded, spy
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from gtp_compile.backend import _InnerCompile, gtp


class Counter:
    """The backend, and how often it is called: with Dynamo's graphs, and inside with forward and backward graphs."""

    def __init__(self) -> None:
        self.captured = self.forwards = self.backwards = 0

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.captured += 1
        count = self.count

        class Counted(_InnerCompile):
            def __call__(self, gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
                count(kwargs.get("is_backward", False))
                return super().__call__(gm, example_inputs, **kwargs)

        with mock.patch("gtp_compile.backend._InnerCompile", Counted):
            return gtp(gm, example_inputs, options={"inner": "eager"})

    def count(self, is_backward: bool) -> None:
        self.backwards += is_backward
        self.forwards += not is_backward

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.captured, self.forwards, self.backwards


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Twin:
    def __init__(self, layers: nn.ModuleList) -> None:
        self.weights = [(double_leaf(b.up.weight), double_leaf(b.down.weight)) for b in layers]

    def __call__(self, x: Tensor) -> Tensor:
        for up, down in self.weights:
            x = x + linear64(torch.relu(linear64(x, up)), down)
        return x

    def compare(self, layers: nn.ModuleList) -> None:
        for block, (up, down) in zip(layers, self.weights, strict=True):
            close_main_grad(block.up.weight, reduced(up.grad))
            close_main_grad(block.down.weight, reduced(down.grad))


def rows(rank: int, step: int) -> Tensor:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)
    return x.requires_grad_()


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def four_layers(rank: int) -> tuple[int, int, int]:
    torch.manual_seed(1)
    layers = nn.ModuleList(Block() for _ in range(4))
    twin = Twin(layers)
    sharded(layers)
    counter = Counter()
    for block in layers:
        block.compile(backend=counter)
    for i in range(2):
        x = rows(rank, i)
        for block in layers:
            x = block(x)
        loss(x).backward()
        loss(twin(rows(rank, i))).backward()
    twin.compare(layers)
    grads = [b.up.weight.main_grad for b in layers]
    different = all(not torch.equal(a, b) for i, a in enumerate(grads) for b in grads[:i])
    expect("four different main_grads", different, True)
    return counter.counts


def test_four_equal_layers_compile_once():
    for captured, forwards, backwards in run_ranks(four_layers, 2):
        assert (captured, forwards, backwards) == (1, 1, 1)


def different_layers(rank: int) -> tuple[int, int, int]:
    """Layers that differ in what a graph depends on must not share one."""
    torch.manual_seed(1)
    layers = nn.ModuleList(Block() for _ in range(4))
    twin = Twin(layers)
    sharded(layers[0])
    sharded(layers[1], main_grad_dtype=None)
    sharded(layers[2], reduce_op="sum")
    sharded(layers[3], shard_fn=lambda fqn, module, param: Replicate())
    counter = Counter()
    for block in layers:
        block.compile(backend=counter)
    x = rows(rank, 0)
    with spy() as seen:
        for block in layers:
            x = block(x)
        loss(x).backward()
    loss(twin(rows(rank, 0))).backward()
    for block, (up, _), op in zip(layers, twin.weights, ("avg", "avg", "sum", "avg"), strict=True):
        if block is not layers[1]:
            close_main_grad(block.up.weight, reduced(up.grad, op))
    found = [(c.kind, c.dtype) for c in reductions(seen)]
    scatter = [("reduce_scatter", FP32)] * 2
    want = [("all_reduce", FP32)] * 2 + scatter + [("reduce_scatter", BF16)] * 2 + scatter
    expect("reductions, last layer first", found, want)
    return counter.counts


def test_layers_that_differ_in_layout_op_or_main_grad_compile_for_themselves():
    for captured, forwards, backwards in run_ranks(different_layers, 2):
        assert (captured, forwards, backwards) == (4, 4, 4)


def two_models(rank: int) -> tuple[int, int, int]:
    """Two models alike, run in turn: shared graphs, nothing else."""
    torch.manual_seed(1)
    models = [nn.ModuleList([Block()]) for _ in range(2)]
    twins = [Twin(m) for m in models]
    counter = Counter()
    for model in models:
        sharded(model)
        model[0].compile(backend=counter)
    forwards = [loss(models[0][0](rows(rank, 0))), loss(models[1][0](rows(rank, 1)))]
    for value in reversed(forwards):
        value.backward()
    models[0].zero_grad()
    loss(models[0][0](rows(rank, 2))).backward()
    loss(twins[0](rows(rank, 2))).backward()
    loss(twins[1](rows(rank, 1))).backward()
    for model, twin in zip(models, twins, strict=True):
        twin.compare(model)
    names = [p.leaf.fqn for m in models for p in m.parameters()]
    expect("names", names, ["0.up.weight", "0.down.weight"] * 2)
    return counter.counts


def test_two_models_in_one_process_do_not_meet():
    for captured, forwards, backwards in run_ranks(two_models, 2):
        assert (captured, forwards, backwards) == (1, 1, 1)


def one_dies(rank: int) -> None:
    """A graph outlives the model it was compiled for, and keeps nothing of it alive."""
    import gc
    import weakref

    torch.manual_seed(1)
    models = [nn.ModuleList([Block()]) for _ in range(2)]
    twin = Twin(models[1])
    counter = Counter()
    for model in models:
        sharded(model)
        model[0].compile(backend=counter)
        loss(model[0](rows(rank, 0))).backward()
    loss(twin(rows(rank, 0))).backward()
    gone = [weakref.ref(p) for p in models[0].parameters()] + [weakref.ref(p.leaf) for p in models[0].parameters()]
    del model
    models[0] = nn.ModuleList()
    gc.collect()
    expect("weights of the dead model that are kept alive", [r() for r in gone if r() is not None], [])
    loss(models[1][0](rows(rank, 1))).backward()
    loss(twin(rows(rank, 1))).backward()
    twin.compare(models[1])
    expect("compilations", counter.counts, (1, 1, 1))


def test_a_model_can_die():
    run_ranks(one_dies, 2)
