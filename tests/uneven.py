"""A model whose weights divide by no number of ranks, its exact twin, and what ranks compare. Runs on the ranks."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dist_helpers import BF16, FP32, close_main_grad, compiled, double_leaf, expect, grouped64, linear64, reduced
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.parameters import ShardedParameter

FEATURES = 16
SPLITS = (4, 0, 5)  # rows of each expert


class Uneven(nn.Module):
    """x bf16[9, 16] -> bf16[9, 1]; rows of each weight's sharded dim on four ranks in the comments."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, 13)  # 4, 4, 4, 1
        self.few = nn.Linear(13, 5, bias=False)  # 2, 2, 1, 0
        self.one = nn.Linear(5, 1, bias=False)  # 1, 0, 0, 0
        self.experts = GroupedLinear(3, FEATURES, 7)  # 2, 2, 2, 1; one group of three
        self.stacked = GroupedLinear(3, FEATURES, 6, bias=False, single_grouped_weight=True)  # dim 1: 2, 2, 2, 0

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        y = self.one(self.few(torch.relu(self.wide(x))))
        y = y + self.experts(x, splits).sum(-1, keepdim=True)
        return y + self.stacked(x, splits).sum(-1, keepdim=True)


class Tied(nn.Module):
    """Embedding and head share one Parameter."""

    def __init__(self, words: int, bias: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, FEATURES), nn.Linear(FEATURES, words, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class UnevenTwin:
    """The same in float64 weight gradients, unsharded; `masters` are float32, by name."""

    def __init__(self, model: Uneven) -> None:
        self.masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}

    def forward(self, x: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        wide, bias = leaves["wide.weight"], leaves["wide.bias"]
        y = linear64(linear64(torch.relu(linear64(x, wide, bias)), leaves["few.weight"]), leaves["one.weight"])
        splits = list(SPLITS)
        discrete = grouped64(x, torch.stack([leaves[f"experts.weight{i}"] for i in range(3)]), splits)
        ones = [torch.ones(n, 1, dtype=BF16) for n in splits]
        biases = [linear64(one, leaves[f"experts.bias{i}"].unsqueeze(1)) for i, one in enumerate(ones)]
        y = y + (discrete + torch.cat(biases)).sum(-1, keepdim=True)
        return y + grouped64(x, leaves["stacked.weight"], splits).sum(-1, keepdim=True)

    def gradients(self, x: Tensor, op: str = "avg") -> dict[str, Tensor]:
        """This step's gradients, reduced over all ranks in float64; also as `.grad` of the masters."""
        leaves = {n: double_leaf(m) for n, m in self.masters.items()}
        loss(self.forward(x, leaves)).backward()
        grads = {n: reduced(leaf.grad, op) for n, leaf in leaves.items()}
        for name, grad in grads.items():
            self.masters[name].grad = grad.float()
        return grads


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def rows(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's batch: x bf16[9, 16], splits i64[3]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(sum(SPLITS), FEATURES, generator=generator).to(BF16), torch.tensor(SPLITS)


def along_out(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    """Every matrix and every stack along out_features; on a mesh of more dims: over the last of them."""
    return Shard(param.ndim - 2) if param.ndim > 1 else Replicate()


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "rows", "shards")[-len(shape) :])


def start(shape: Sequence[int], **kwargs: Any) -> tuple[Uneven, UnevenTwin]:
    """The model over a mesh of this shape, and its twin."""
    torch.manual_seed(1)
    model = Uneven()
    twin = UnevenTwin(model)
    gtp_compile.shard(model, mesh_of(*shape), **{"shard_fn": along_out, "param_dtype": BF16, **kwargs})
    return model, twin


def local_rows(size: int, ranks: int, rank: int) -> int:
    """How many of `size` rows a rank holds: as many as all before it, until none are left."""
    chunk = -(-size // ranks)
    return max(0, min(chunk, size - rank * chunk))


def message(kind: Any, call: Callable[[], Any]) -> str:
    """The text of the exception that `call` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing of {kind} was raised")


class Warned(logging.Handler):
    """`with Warned() as texts`: what gtp_compile warns about meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("gtp_compile").addHandler(self)
        return self.texts

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("gtp_compile").removeHandler(self)


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


def expect_equal(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    expect(f"{what}: names", list(got), list(want))
    for name, value in want.items():
        expect(f"{what}: {name}", torch.equal(got[name], value), True)


def expect_sound(model: Uneven) -> None:
    """Each pair is one: the leaf over the parameter's memory, main_grad of its shape, the groups complete."""
    for name, param in model.named_parameters():
        leaf = param.leaf
        expect(
            f"{name}: a placed parameter", isinstance(param, ShardedParameter) and isinstance(param, nn.Parameter), True
        )
        expect(f"{name}: one memory", leaf.data_ptr(), param._local_tensor.data_ptr())
        expect(f"{name}: back to it", leaf.registered is param, True)
        expect(f"{name}: main_grad", (leaf.main_grad.shape, leaf.main_grad.dtype), (leaf.shape, FP32))
        expect(f"{name}: requires_grad", leaf.requires_grad, param.requires_grad)
    experts = [model.experts.get_parameter(f"weight{i}").leaf for i in range(3)]
    expect("the experts' group", all(a is b for a, b in zip(experts[0].group, experts, strict=True)), True)


def expect_trains(model: Uneven, twin: UnevenTwin, rank: int) -> None:
    """One compiled step gives the twin's gradients."""
    model.zero_grad()
    loss(compiled(model)(*rows(rank))).backward()
    want = twin.gradients(rows(rank)[0])
    for name, param in model.named_parameters():
        close_main_grad(param, want[name])
