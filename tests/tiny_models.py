"""Small models and hand-written graphs that the tests share. One process; a joint graph is captured once and copied."""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils.checkpoint import checkpoint

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile._compat import min_cut_rematerialization_partition
from gtp_compile.passes.base import PassContext
from gtp_compile.passes.record_operands import record_operands
from gtp_compile.pipeline import JOINT_PASSES
from gtp_compile.testing import JointGraph, capture_joint, count_ops, fake_mesh
from gtp_compile.verifying import _Float64Run

WORLD = 4
EXPERTS, ROWS, IN, OUT = 4, 24, 8, 16
BF16 = torch.bfloat16

aten = torch.ops.aten


class Dense(nn.Module):
    """One linear layer, `uses` times in a row (OUT == IN where more than once)."""

    def __init__(self, out_features: int = OUT, bias: bool = False, uses: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(IN, out_features, bias=bias)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(BF16)
        for _ in range(self.uses):
            x = self.up(x)
        return x


class ReadOnce(nn.Module):
    """One read of a weight that is used twice: autograd sums before the anchor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(IN, IN) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up
        return torch.relu(x.to(BF16) @ weight.t()) @ weight.t()


class Parts(nn.Module):
    """Parts of one weight, each used on its own: an expert of a stack, half of a fused matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, OUT, IN) * 0.3)
        self.fused = nn.Parameter(torch.randn(2 * IN, OUT) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        experts, fused = self.experts, self.fused
        y = x.to(BF16) @ experts[0].t() + x.to(BF16) @ experts[2].t()
        return (y @ fused[:IN].t()) * (y @ fused[IN:].t())


class Experts(nn.Module):
    """Stacked experts as in Hugging Face: `[E, N, K]`, or `[E, K, N]` with `is_transposed`; rows arrive sorted."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (EXPERTS, IN, OUT) if is_transposed else (EXPERTS, OUT, IN)
        self.proj = nn.Parameter(torch.randn(*shape) * 0.3)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        weight = self.proj if self.is_transposed else self.proj.transpose(-2, -1)
        return torch._grouped_mm(x.to(BF16), weight, offs=offs)


class TorchGroup(nn.Module):
    """Discrete weights, stacked in forward and multiplied by torch's own grouped GEMM."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (IN, OUT) if is_transposed else (OUT, IN)
        self.weight0, self.weight1, self.weight2 = (nn.Parameter(torch.randn(*shape) * 0.3) for _ in range(3))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        weight = torch.stack([w.to(BF16) for w in (self.weight0, self.weight1, self.weight2)])
        return torch._grouped_mm(x.to(BF16), weight if self.is_transposed else weight.transpose(-2, -1), offs=offs)


class PlainFollowers(GroupedLinear):
    """A GroupedLinear in bf16: with only `weight0` placed, the followers are plain bf16 parameters."""

    def __init__(self) -> None:
        super().__init__(3, IN, OUT, bias=False, dtype=BF16)


class ExpertBias(nn.Module):
    """A bias for each expert, read by row: the gradient is scattered into zeros."""

    def __init__(self, select: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(EXPERTS, OUT))
        self.select = select

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + (self.bias.index_select(0, ids) if self.select else self.bias[ids])


class TiedHead(nn.Module):
    """An embedding and an output layer that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(OUT, IN)
        self.head = nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Blocks(nn.Module):
    """Equal blocks one after another, each perhaps checkpointed."""

    def __init__(self, num_blocks: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(BF16)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.up = nn.Linear(IN, OUT, bias=False)
        self.down = nn.Linear(OUT, IN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class PickedExperts(nn.Module):
    """A weight for each row, as Hugging Face's batched_mm experts read them: the gradient of each row is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(EXPERTS, OUT, IN))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.proj[ids], x.to(BF16).unsqueeze(-1)).squeeze(-1)


class BatchedExperts(nn.Module):
    """Hugging Face's `batched_mm` experts: two weights and biases for each row, and routing weights behind them."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = ((EXPERTS, IN, OUT), (EXPERTS, OUT, IN))[:: 1 if is_transposed else -1]
        self.up, self.down = nn.Parameter(torch.randn(up) * 0.3), nn.Parameter(torch.randn(down) * 0.3)
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(EXPERTS, OUT)), nn.Parameter(torch.randn(EXPERTS, IN))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.is_transposed:
            y = torch.bmm(x.unsqueeze(1), weight).squeeze(1)
        else:
            y = torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)
        return y + bias

    def forward(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        is_sentinel = ids >= EXPERTS  # as with expert parallelism
        ids = ids.clamp(0, EXPERTS - 1)
        y = torch.relu(self.linear(x.to(BF16), self.up[ids], self.up_bias[ids]))
        y = self.linear(y, self.down[ids], self.down_bias[ids])
        return y * routing.masked_fill(is_sentinel, 0.0).unsqueeze(-1)


class Batched(nn.Module):
    """A batched GEMM over all experts, each with equally many rows (capacity factor)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(EXPERTS, OUT, IN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.to(BF16), self.proj.transpose(-2, -1))


class Broadcast(nn.Module):
    """One weight for a batch of matrices, expanded by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(OUT, IN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.to(BF16), self.proj.t().expand(x.shape[0], -1, -1))


class Scaled(nn.Module):
    """Experts that are scaled before their GEMM, each by a number of a tensor: a form that no pass knows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(EXPERTS, OUT, IN))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.bmm(x.to(BF16), (self.proj * scale).transpose(-2, -1))


# What shard does with them.


def shard_all(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    """Matrices and stacks along out_features, vectors replicated."""
    if param.ndim == 1:
        return Replicate()
    return Shard(param.ndim - (1 if getattr(module, "is_transposed", False) else 2))


def leader_only(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate | None:
    return shard_all(fqn, module, param) if fqn == "weight0" else None


class Tiny(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    args: tuple[Tensor, ...]
    shard_fn: Callable[..., Any] = shard_all


def _frozen(name: str) -> nn.Module:
    model = GroupedLinear(3, IN, OUT, bias=False)
    getattr(model, name).requires_grad_(False)
    return model


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def ends_of(*counts: int) -> Tensor:
    """Row counts as torch's cumulative offsets."""
    return torch.tensor(counts).cumsum(0).to(torch.int32)


_OFFS = ends_of(7, 0, 12, 5)
_OFFS3 = ends_of(7, 0, 17)
_SPLITS = torch.tensor([7, 0, 17])
_IDS = torch.arange(ROWS) % 3
_IDS_AND_SENTINEL = torch.arange(ROWS) * 7 % 5  # 4 is no expert

MODELS: dict[str, Callable[[], Tiny]] = {
    "dense": lambda: Tiny(Dense(), (_x(ROWS, IN),)),
    "dense_bias": lambda: Tiny(Dense(bias=True), (_x(ROWS, IN),)),
    "twice": lambda: Tiny(Dense(IN, uses=2), (_x(ROWS, IN),)),
    "thrice": lambda: Tiny(Dense(IN, uses=3), (_x(ROWS, IN),)),
    "read_once": lambda: Tiny(ReadOnce(), (_x(ROWS, IN),)),
    "parts": lambda: Tiny(Parts(), (_x(ROWS, IN),)),
    "experts": lambda: Tiny(Experts(), (_x(ROWS, IN), _OFFS)),
    "experts_transposed": lambda: Tiny(Experts(is_transposed=True), (_x(ROWS, IN), _OFFS)),
    "grouped": lambda: Tiny(GroupedLinear(3, IN, OUT), (_x(ROWS, IN), _SPLITS)),
    "grouped_stacked": lambda: Tiny(
        GroupedLinear(3, IN, OUT, bias=False, single_grouped_weight=True), (_x(ROWS, IN), _SPLITS)
    ),
    "leader_only": lambda: Tiny(PlainFollowers(), (_x(ROWS, IN), _SPLITS), leader_only),
    "leader_only_torch": lambda: Tiny(TorchGroup(), (_x(ROWS, IN), _OFFS3), leader_only),
    "leader_only_transposed": lambda: Tiny(TorchGroup(is_transposed=True), (_x(ROWS, IN), _OFFS3), leader_only),
    "one_by_one": lambda: Tiny(TorchGroup(), (_x(ROWS, IN), _OFFS3)),  # three groups of one, one GEMM
    "frozen_member": lambda: Tiny(_frozen("weight1"), (_x(ROWS, IN), _SPLITS)),
    "frozen_leader": lambda: Tiny(_frozen("weight0"), (_x(ROWS, IN), _SPLITS)),
    "embedding": lambda: Tiny(nn.Embedding(OUT, IN), (_IDS,)),
    "layer_norm": lambda: Tiny(nn.LayerNorm(IN), (_x(ROWS, IN),)),
    "rms_norm": lambda: Tiny(nn.RMSNorm(IN), (_x(ROWS, IN),)),
    "expert_bias_index": lambda: Tiny(ExpertBias(select=False), (_x(ROWS, OUT), _IDS)),
    "expert_bias_select": lambda: Tiny(ExpertBias(select=True), (_x(ROWS, OUT), _IDS)),
    "tied": lambda: Tiny(TiedHead(), (_IDS,)),
    "blocks": lambda: Tiny(Blocks(3), (_x(ROWS, IN),)),
    "checkpointed": lambda: Tiny(Blocks(2, checkpointed=True), (_x(ROWS, IN),)),
    "picked": lambda: Tiny(PickedExperts(), (_x(ROWS, IN), _IDS)),
    "batched_experts": lambda: Tiny(BatchedExperts(), (_x(ROWS, IN), _IDS_AND_SENTINEL, _x(ROWS))),
    "batched_experts_transposed": lambda: Tiny(BatchedExperts(True), (_x(ROWS, IN), _IDS_AND_SENTINEL, _x(ROWS))),
    "batched": lambda: Tiny(Batched(), (_x(EXPERTS, ROWS, IN),)),
    "broadcast": lambda: Tiny(Broadcast(), (_x(EXPERTS, ROWS, IN),)),
    "scaled": lambda: Tiny(Scaled(), (_x(EXPERTS, ROWS, IN), _x(EXPERTS, 1, 1))),
}


def sharded(name: str, mesh: Any, **kwargs: Any) -> Tiny:
    """One of `MODELS`, placed over a mesh: float32 shards, computed with in bf16."""
    torch.manual_seed(0)
    tiny = MODELS[name]()
    gtp_compile.shard(tiny.model, mesh, **{"shard_fn": tiny.shard_fn, "param_dtype": BF16, **kwargs})
    return tiny


def capture(name: str, world: int = WORLD, **kwargs: Any) -> JointGraph:
    """The joint graph of one of `MODELS`, captured anew."""
    with fake_mesh(world) as mesh:
        tiny = sharded(name, mesh, **kwargs)
        return capture_joint(tiny.model, *tiny.args)


_captured = functools.cache(capture)


def joint(name: str, world: int = WORLD) -> JointGraph:
    """The same, captured once in this process; the copy is the caller's to rewrite."""
    return _captured(name, world).copy()


@functools.cache
def _behind(name: str, world: int, passes: tuple[str, ...]) -> JointGraph:
    if not passes:
        return joint(name, world)
    graph = _behind(name, world, passes[:-1]).copy()
    graph.run(passes[-1])
    return graph


def behind(name: str, *passes: str, world: int = WORLD) -> JointGraph:
    """The joint graph of one of `MODELS` behind these passes, likewise."""
    return _behind(name, world, passes).copy()


# Graphs written by hand.


def shard_like(grad: Tensor, dim: int = 0, world: int = WORLD) -> Tensor:
    """A float32 shard of a weight with this gradient."""
    shape = list(grad.shape)
    if dim >= 0:
        shape[dim] //= world
    return torch.zeros(shape)


def finalize(grad: Tensor, shard: Tensor, main_grad: Tensor | None = None, dim: int = 0) -> Tensor:
    """A gradient anchor of a group of one; sums over ranks in float32."""
    size = 0 if dim < 0 else grad.shape[dim]
    return torch.ops.gtp.finalize.default(grad, [shard], [main_grad], ["0"], [WORLD], dim, size, "avg", torch.float32)[
        0
    ]


def hand_written(fn: Callable[..., Any], *inputs: Tensor) -> JointGraph:
    """The graph of a function of operators as Inductor sees them, traced under fake tensors.

    `fn` returns a list: its outputs are all backward's.
    """
    return JointGraph(make_fx(fn, tracing_mode="fake")(*inputs), 0, inputs)


def wgrad_graph(compute: Callable[..., Tensor], *operands: Tensor, dim: int = 0) -> JointGraph:
    """`operands -> compute -> finalize -> output`, with the shard as the graph's first input."""
    shard = shard_like(compute(*operands), dim)
    return hand_written(lambda shard, *operands: [finalize(compute(*operands), shard, None, dim)], shard, *operands)


def nodes(graph: JointGraph | fx.Graph, target: Any) -> list[fx.Node]:
    """The calls of one operator, in graph order."""
    graph = graph.module.graph if isinstance(graph, JointGraph) else graph
    return graph.find_nodes(op="call_function", target=target)


def ops(graph: JointGraph) -> Counter[str]:
    return count_ops(graph.module.graph)


def run(graph: JointGraph, *names: str) -> JointGraph:
    """The same graph, after these passes."""
    for name in names:
        graph.run(name)
    return graph


def assert_unchanged_by(graph: JointGraph, name: str) -> None:
    """A second run of a pass changes nothing."""
    before = graph.text()
    again = graph.run(name)
    assert not again.ops
    assert graph.text() == before


def partitioned(
    name: str, *, without: Sequence[str] = (), world: int = WORLD
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward and backward of one of `MODELS` behind the joint passes, and how many outputs are the forward's."""
    return split(behind(name, *(p.__name__ for p in JOINT_PASSES if p.__name__ not in without), world=world))


def split(graph: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward and backward of a joint graph, which is used up."""
    count = graph.num_fwd_outputs
    return *min_cut_rematerialization_partition(graph.module, None, num_fwd_outputs=count), count


def listing(nodes: Iterable[fx.Node]) -> str:
    """One line a node, `name: dtype[shape] = operator(arguments)`; the same in every version of torch."""
    return "\n".join(_line(n) for n in nodes if n.op == "call_function")


def _line(node: fx.Node) -> str:
    value = node.meta.get("val")
    kind = f": {dtype_abbrs[value.dtype]}{list(value.shape)}" if isinstance(value, Tensor) else ""
    if node.target is operator.getitem:
        return f"{node.name}{kind} = {node.args[0]}[{node.args[1]}]"
    given = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}{kind} = {node.target.namespace}.{node.target._opname}({', '.join(given)})"


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_argument(v) for v in value)}]"
    return str(value) if isinstance(value, fx.Node | torch.dtype | torch.memory_format) else repr(value)


# Numbers.


def anchor_errors(graph: JointGraph) -> list[float]:
    """For each gradient anchor of a graph, the relative error of what reaches it against float64, from its operands."""
    graph = graph.copy()
    programs: list[fx.Graph] = []
    record_operands(graph.module, PassContext("joint", graph.num_fwd_outputs, programs=programs))
    graph.module.recompile()
    errors = []

    def compare(grad: Tensor, shard: Tensor, operands: list[Tensor], program: int) -> Tensor:
        errors.append(relative_error(grad, _Float64Run(programs[program]).run(*operands)))
        return grad

    for node in nodes(graph, torch.ops.gtp.record.default):
        node.target = compare
    graph.module.recompile()
    graph.evaluate()
    return errors


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`, or the bare norm where `want` is zero."""
    error, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return error / norm if norm else error
