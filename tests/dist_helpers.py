"""For tests on several ranks: a spy on every collective, layers that know their exact weight gradient, comparisons.

Everything here runs on the ranks (see `ranks.run_ranks`), where pytest rewrites no assertion: `expect` and `close` say
what they compared.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

import gtp_compile
from gtp_compile.parameters import ShardedParameter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Every operator of torch.distributed's dispatcher layer that reaches another rank, under the name of what it does.
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective as this rank issued it: what travels, and its dtype and number of elements (the larger side)."""

    kind: str
    dtype: torch.dtype
    numel: int

    def __repr__(self) -> str:
        return f"{self.kind}({str(self.dtype).removeprefix('torch.')}[{self.numel}])"


@contextlib.contextmanager
def spy() -> Iterator[list[Collective]]:
    """Record every collective that this rank issues, in order; they run as ever.

    In the dispatcher, below everything that can issue one: compiled code, functional collectives, DTensor,
    `torch.distributed` itself.
    """
    seen: list[Collective] = []
    lib = torch.library.Library("c10d", "IMPL")

    def watched(name: str, kind: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, name).default

        def run(keyset: Any, *args: Any) -> Any:
            tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
            numel = max((t.numel() for t in tensors), default=0)
            seen.append(Collective(kind, tensors[0].dtype if tensors else torch.uint8, numel))
            # Gives the interpreter lock away, which gloo's threads need (a kernel's call_boxed does not).
            return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)

        return run

    for name, kind in _COLLECTIVES.items():
        lib.impl(name, watched(name, kind), "BackendSelect", with_keyset=True)
    try:
        yield seen
    finally:
        lib._destroy()


def reductions(seen: list[Collective]) -> list[Collective]:
    return [c for c in seen if c.kind in REDUCTIONS]


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("gtp",))


def shard_matrices(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard | Replicate:
    """Weights of linear layers along out_features, everything else replicated."""
    if isinstance(module, nn.Linear | gtp_compile.GroupedLinear) and "weight" in fqn:
        return Shard(param.ndim - 2)
    return Replicate()


def sharded(model: nn.Module, **kwargs: Any) -> nn.Module:
    """`model`, sharded over all ranks; by default linear weights along out_features, computed with in bf16."""
    kwargs = {"shard_fn": shard_matrices, "param_dtype": BF16, **kwargs}
    return gtp_compile.shard(model, world_mesh(), **kwargs)


def compiled(model: Any, fullgraph: bool = True, **options: Any) -> Any:
    """`model` through the backend; the rewritten graphs run as they are."""
    return torch.compile(model, backend="gtp", fullgraph=fullgraph, options={"inner": "eager", **options})


# Layers whose weight gradient is exact: forward and input gradient in the input's dtype, the wgrad in float64.


class _Linear64(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).double()
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dy @ weight.to(dy.dtype), rows.t() @ x.reshape(-1, x.shape[-1]).double(), db


class _Grouped64(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, splits: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.splits = splits
        parts = zip(x.split([*splits, len(x) - sum(splits)])[:-1], weight.to(x.dtype), strict=True)
        y = torch.cat([part @ w.t() for part, w in parts])
        return torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rest = len(x) - sum(ctx.splits)
        xs, dys = (t.split([*ctx.splits, rest])[:-1] for t in (x, dy))
        dx = torch.cat([d @ w for d, w in zip(dys, weight.to(dy.dtype), strict=True)])
        dw = torch.stack([d.double().t() @ p.double() for d, p in zip(dys, xs, strict=True)])
        return torch.cat([dx, dx.new_zeros(rest, dx.shape[1])]), dw, None


def linear64(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in x's dtype, with the gradients of `weight` and `bias` (float64) in float64."""
    return _Linear64.apply(x, weight, bias)


def grouped64(x: Tensor, weight: Tensor, splits: list[int]) -> Tensor:
    """A grouped linear in x's dtype, with the gradient of `weight` (float64) in float64; rows past the splits are 0."""
    return _Grouped64.apply(x, weight, splits)


def double_leaf(param: Tensor) -> Tensor:
    """A float64 copy of a parameter that isn't sharded yet, to be the twin's leaf."""
    return param.detach().double().requires_grad_()


def reduced(grad: Tensor, op: str = "avg") -> Tensor:
    """The ranks' gradients, summed or averaged in float64."""
    total = grad.double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if op == "avg" else total


def whole(param: ShardedParameter, local: Tensor | None) -> Tensor:
    """The full tensor of which `local` is this rank's part, in float64."""
    if local is None:
        raise AssertionError(f"{param.leaf.fqn}: nothing to compare, it is None")
    local = getattr(local, "_local_tensor", local).detach()
    shape, stride = param.shape, param.stride()
    part = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)
    return part.full_tensor().double()


def error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error; absolute where `want` is zero; infinite where `got` isn't finite."""
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = want.double().norm().item()
    return (got.double() - want.double()).norm().item() / (norm or 1.0)


def close(what: str, got: Tensor, want: Tensor, bound: float = 1e-6) -> None:
    found = error(got, want)
    if not found <= bound:
        raise AssertionError(f"{what}: error {found:.2e}, at most {bound:.0e} is expected")


def close_main_grad(param: ShardedParameter, want: Tensor, bound: float = 1e-6) -> None:
    """main_grad, gathered, against the full gradient that every rank knows."""
    close(f"{param.leaf.fqn}.main_grad", whole(param, param.main_grad), want, bound)


def expect(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise AssertionError(f"{what}: got {got!r}, want {want!r}")


def no_outstanding_work() -> None:
    expect("collectives that nobody waited for", torch._C._distributed_c10d._get_work_registry_size(), 0)
