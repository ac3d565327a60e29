"""`shard`: place the weights of a model over a process group, in place, and leave it an ordinary PyTorch model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from gtp_compile._compat import is_fake
from gtp_compile.expert_lists import ExpertsFn, is_expert_list, mark_expert_lists
from gtp_compile.grouped_linear import GroupedLinear, Linear
from gtp_compile.optim import watch_optimizers
from gtp_compile.parameters import ComputeLeaf, ShardedParameter, check_main_grad_dtype, pair, take_attributes
from gtp_compile.passes.collective_ops import REPLICATED, Layout
from gtp_compile.sharded_module import Tree, leaves_in, take_over
from gtp_compile.weights import is_distributed_weight

__all__ = ["ShardFn", "leaves_of", "shard", "shard_experts", "shard_large"]

log = logging.getLogger(__name__)

ShardFn = Callable[[str, nn.Module, nn.Parameter], Placement | Sequence[Placement] | None]
DtypeFn = Callable[[str, nn.Module, nn.Parameter], torch.dtype | None]

# A bf16 weight of this size takes about as long to gather over NVLink as a collective takes to start.
LARGE_NUMEL = 2**20

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def shard_experts(fqn: str, module: nn.Module, param: nn.Parameter) -> Placement | None:
    """A `shard_fn`: expert weights along out_features, everything else replicated.

    Expert weights are the floating-point parameters of three or more dimensions outside convolutions (stacked
    `[E, N, K]`: dim 1; `[E, K, N]`, where the module says `is_transposed = True` as Hugging Face's do: dim 2), and the
    weights of `GroupedLinear`.
    """
    if not param.is_floating_point():
        return None
    if isinstance(module, GroupedLinear) and fqn.rpartition(".")[2].startswith("weight"):
        return Shard(param.ndim - 2)
    if param.ndim >= 3 and not isinstance(module, _CONVOLUTIONS):
        return Shard(2 if getattr(module, "is_transposed", False) else 1)
    return Replicate()


def shard_large(fqn: str, module: nn.Module, param: nn.Parameter, *, min_numel: int = LARGE_NUMEL) -> Placement | None:
    """The default `shard_fn`: expert weights as `shard_experts` has them, other large weights along their first dim.

    Large is what has two or more dims and at least `min_numel` elements: a smaller weight costs a collective's latency
    to gather and saves little memory, so it is replicated, as norms and biases are. `functools.partial(shard_large,
    min_numel=0)` shards all that have two dims.
    """
    placement = shard_experts(fqn, module, param)
    large = param.ndim >= 2 and param.numel() >= min_numel
    return Shard(0) if large and isinstance(placement, Replicate) else placement


@dataclass(frozen=True, slots=True)
class _Place:
    """One registered parameter to place: its first name, and every (module, attribute) that holds it."""

    fqn: str
    module: nn.Module
    param: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shard_fn: ShardFn | None = None,
    param_dtype: torch.dtype | DtypeFn | None = None,
    main_grad_dtype: torch.dtype | None = torch.float32,
    reduce_op: str = "avg",
    src_data_rank: int | None = 0,
    experts_fn: ExpertsFn | None = None,
) -> nn.Module:
    """Place the parameters of `model` over `mesh`, in place, and return the model.

    Afterwards `model.parameters()` are DTensors of the logical global shape over this rank's part, for stock
    optimizers, `clip_grad_norm_`, `state_dict` and distributed checkpoints. Each has a `main_grad` of the local shape,
    into which backward accumulates; where it has the parameter's dtype, `.grad` is a DTensor over the same memory.

    Args:
        model: any module; nobody needs to change it. Its parameters are equal on all ranks, or taken from one.
        mesh: a device mesh. On one of several dims a weight is sharded over one of them and replicated over the others.
        shard_fn: `(fqn, module, param) -> Shard(dim) | Replicate() | None`, or a sequence of placements, one per mesh
            dim. A lone `Shard(dim)` means the last mesh dim, as in hybrid-sharded data parallelism. None leaves a
            parameter plain, so that nothing reduces its gradient. Default: `shard_large`.
        param_dtype: dtype in which weights are gathered and computed with; None: each parameter's own. Models that keep
            some weights in float32 need a function `(fqn, module, param) -> dtype or None`. A weight group has its
            leader's.
        main_grad_dtype: dtype of the accumulators, hence (the dtype rule) of the weight gradients and of their sum
            over ranks. None attaches none.
        reduce_op: "avg" (a loss averaged over each rank's batch) or "sum" (a loss summed over all tokens).
        src_data_rank: rank (position in the flattened mesh) whose parameters and buffers everybody gets. None:
            nothing travels, but a hash of the values is compared across ranks.
        experts_fn: `(fqn, module) -> bool`, asked of every ModuleList and ModuleDict: whether its members are experts
            of which a forward calls those that its batch hits. Where the loop over them runs outside compiled graphs,
            the weights of all are gathered together. Default: `is_expert_list`, which goes by the names.

    Raises:
        ValueError: a placement that can't be made; the message names the parameter and the way out.
        TypeError: an argument of the wrong type.
    """
    dtype_of = param_dtype if callable(param_dtype) else lambda fqn, module, param: param_dtype
    _check_arguments(mesh, main_grad_dtype, reduce_op, src_data_rank)
    if is_fake(mesh.get_group(0)):
        src_data_rank = None  # nothing travels on a fake mesh: what would arrive is memory as it was
    places = list(_places(model))
    dtypes = {id(p.param): _compute_dtype(p, dtype_of) for p in places}
    placements = [_placement(p, shard_fn or shard_large, mesh) for p in places]
    todo = [(p, pl) for p, pl in zip(places, placements, strict=True) if pl is not None]
    _refuse_overlap(places, placements)
    if src_data_rank is None:
        _check_equal(model, mesh)
    made: dict[int, ShardedParameter] = {}
    for place, spread in todo:
        param = place.param
        layout = _layout(param, spread, mesh, reduce_op)
        rank = mesh.get_local_rank(_shard_axis(spread)) if layout.sharded else 0
        made[id(param)] = pair(
            _local_part(param.detach(), layout, rank, spread, mesh, src_data_rank),
            mesh,
            spread,
            fqn=place.fqn,
            layout=layout,
            shard_rank=rank,
            global_shape=param.shape,
            requires_grad=param.requires_grad,
            param_dtype=dtypes[id(param)],
            main_grad_dtype=main_grad_dtype,
        )
        take_attributes(made[id(param)], param)
        param._gtp_replaced = place.fqn  # type: ignore[attr-defined]  # who still holds it is told so
        for module, name in place.holders:
            module._parameters[name] = made[id(param)]  # type: ignore[assignment]
    if src_data_rank is not None:
        for buffer in (b for b in model.buffers() if not b.is_meta):
            for axis, source in enumerate(_coordinate(src_data_rank, mesh)):
                dist.broadcast(buffer, group=mesh.get_group(axis), group_src=source)
    mark_expert_lists(model, experts_fn or is_expert_list)
    _swap_classes(model)
    # DistributedDataParallel around the model leaves ours alone: we reduce them.
    names = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *_placed_names(model)]
    model._ddp_params_and_buffers_to_ignore = list(dict.fromkeys(names))  # type: ignore[assignment]
    watch_optimizers()
    return model


def leaves_of(model: nn.Module) -> list[ComputeLeaf]:
    """The compute leaves of every placed parameter, each once, in module order."""
    return [p.leaf for p in model.parameters() if isinstance(p, ShardedParameter)]


def _check_arguments(
    mesh: DeviceMesh,
    main_grad_dtype: torch.dtype | None,
    reduce_op: str,
    src_data_rank: int | None,
) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: a DeviceMesh is expected, got {type(mesh).__name__}; see init_device_mesh")
    if reduce_op not in ("avg", "sum"):
        raise ValueError(f"reduce_op: 'avg' or 'sum' is expected, got {reduce_op!r}")
    if main_grad_dtype is not None:
        if not main_grad_dtype.is_floating_point:
            raise TypeError(f"main_grad_dtype: a floating-point dtype is expected, got {main_grad_dtype}")
        check_main_grad_dtype(main_grad_dtype, "main_grad_dtype")
    if src_data_rank is not None and not 0 <= src_data_rank < mesh.size():
        raise ValueError(f"src_data_rank: a rank of the mesh (0 to {mesh.size() - 1}) is expected, got {src_data_rank}")


def _compute_dtype(place: _Place, dtype_of: DtypeFn) -> torch.dtype:
    dtype = dtype_of(place.fqn, place.module, place.param)
    if dtype is None:
        return place.param.dtype
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{place.fqn}: param_dtype: a floating-point dtype is expected, got {dtype}")
    return dtype


def _places(model: nn.Module) -> Iterator[_Place]:
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    params: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                fqn = f"{path}.{name}" if path else name
                holders.setdefault(id(param), []).append((fqn, module, name))
                params[id(param)] = param
    for key, found in holders.items():
        fqn, module, _ = found[0]
        yield _Place(fqn, module, params[key], tuple((m, n) for _, m, n in found))


def _placement(place: _Place, shard_fn: ShardFn, mesh: DeviceMesh) -> tuple[Shard | Replicate, ...] | None:
    """What `shard_fn` wants for a parameter, one placement per mesh dim, checked; None: leave it plain."""
    fqn, param = place.fqn, place.param
    if isinstance(param, ShardedParameter):
        raise ValueError(f"{fqn}: is sharded already; call shard once, on the outermost module")
    if _belongs_to_another_tool(place):
        return None
    wanted = shard_fn(fqn, place.module, param)
    if wanted is None:
        return None
    if isinstance(param, DTensor):
        raise ValueError(f"{fqn}: is a DTensor of another tool; let shard_fn return None for it, or shard it here only")
    spread: tuple[Any, ...] = (*[Replicate()] * (mesh.ndim - 1), wanted)
    if isinstance(wanted, list | tuple):
        spread = tuple(wanted)
    if not all(isinstance(p, Shard | Replicate) for p in spread):
        raise TypeError(f"{fqn}: shard_fn returns Shard(dim), Replicate(), a sequence of them, or None, got {wanted!r}")
    if len(spread) != mesh.ndim:
        raise ValueError(f"{fqn}: one placement per mesh dim is expected ({mesh.ndim}), shard_fn gave {len(spread)}")
    shards = [p for p in spread if isinstance(p, Shard)]
    if len(shards) > 1:
        raise ValueError(
            f"{fqn}: can be sharded over one mesh dim only, shard_fn gave {spread!r}; flatten the two dims"
        )
    _check_placeable(place)
    if not shards:
        return spread
    dim = shards[0].dim + param.ndim if shards[0].dim < 0 else shards[0].dim
    if not 0 <= dim < param.ndim:
        raise ValueError(f"{fqn}: can't shard dim {shards[0].dim} of shape {tuple(param.shape)}")
    return tuple(Shard(dim) if isinstance(p, Shard) else p for p in spread)


def _belongs_to_another_tool(place: _Place) -> bool:
    """Whether a parameter bears the protocol, or is in the group of a leader that does; its module asks the hooks then.

    Raises:
        ValueError: the module reads the weight as it is, which is a shard.
    """
    name = place.fqn.rpartition(".")[2]
    if isinstance(place.module, GroupedLinear):
        groups = [*place.module.discrete_groups(), ["weight"]]
        leader = next((group[0] for group in groups if name in group), name)
        return is_distributed_weight(place.module._parameters[leader])
    if not is_distributed_weight(place.param):
        return False
    for module, attribute in place.holders:
        if type(module) is nn.Linear and attribute == "weight":
            module.__class__ = Linear
        if not (isinstance(module, GroupedLinear | Linear) and attribute.startswith("weight")):
            raise ValueError(
                f"{place.fqn}: a {type(place.param).__name__} bears the distributed-weight protocol, but a "
                f"{type(module).__name__} reads it without asking its hooks; use gtp_compile.Linear or "
                "gtp_compile.GroupedLinear there"
            )
    return True


def _check_placeable(place: _Place) -> None:
    fqn, param = place.fqn, place.param
    if param.grad is not None:
        raise ValueError(f"{fqn}: has a gradient, which would be lost; call zero_grad() before gtp_compile.shard")
    if not param.is_floating_point():
        raise ValueError(f"{fqn}: only floating-point parameters are placed, this one is {param.dtype}; return None")
    if isinstance(place.module, nn.RNNBase):
        raise ValueError(
            f"{fqn}: {type(place.module).__name__} keeps its weights in a list of its own, which gtp_compile can't "
            "follow; let shard_fn return None for it and reduce its gradients with DistributedDataParallel"
        )


def _shard_axis(spread: Sequence[Placement]) -> int:
    """The mesh dim over which a weight is sharded; -1 where it is replicated over all."""
    return next((axis for axis, p in enumerate(spread) if isinstance(p, Shard)), -1)


def _layout(param: nn.Parameter, spread: Sequence[Placement], mesh: DeviceMesh, reduce_op: str) -> Layout:
    axis = _shard_axis(spread)
    axes = [axis, *(a for a in range(mesh.ndim) if a != axis)] if axis >= 0 else list(range(mesh.ndim))
    placement = spread[axis]
    dim = placement.dim if isinstance(placement, Shard) else REPLICATED
    return Layout(
        tuple(mesh.get_group(a).group_name for a in axes),
        tuple(mesh.size(a) for a in axes),
        dim,
        param.shape[dim] if dim != REPLICATED else 0,
        reduce_op,
    )


def _coordinate(rank: int, mesh: DeviceMesh) -> list[int]:
    """The coordinates in the mesh of its `rank`-th member, in row-major order."""
    coordinate: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        rank, c = divmod(rank, mesh.size(axis))
        coordinate.insert(0, c)
    return coordinate


def _refuse_overlap(places: list[_Place], placements: Sequence[object]) -> None:
    """Two parameters over one storage would be two weights with two main_grads, and an optimizer would part them."""
    spans: dict[int, list[tuple[int, int, bool, _Place]]] = {}
    for place, placement in zip(places, placements, strict=True):
        param = place.param
        if not (isinstance(param, DTensor) or param.is_meta or param.numel() == 0):
            start, end = _span(param)
            storage = param.untyped_storage().data_ptr()
            spans.setdefault(storage, []).append((start, end, placement is not None, place))
    for found in spans.values():
        found.sort(key=lambda span: span[:2])
        furthest = found[0]
        for span in found[1:]:
            if span[0] < furthest[1] and (span[2] or furthest[2]):
                raise ValueError(
                    f"{span[3].fqn}: shares memory with {furthest[3].fqn}, but is another Parameter; tie them by "
                    "assigning one Parameter to both modules, or give one of them memory of its own"
                )
            furthest = max(furthest, span, key=lambda s: s[1])


def _span(t: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one behind its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize


def _local_part(
    full: Tensor, layout: Layout, rank: int, spread: Sequence[Placement], mesh: DeviceMesh, src: int | None
) -> Tensor:
    """This rank's part of a parameter, contiguous and in memory of its own; one weight travels at a time."""
    part = full.clone(memory_format=torch.contiguous_format)
    if src is None or full.is_meta:
        return layout.part(part, rank).clone(memory_format=torch.contiguous_format)
    # Along one mesh dim after the other, as DTensor does: what the source gives to its neighbours they pass on.
    for axis, source in enumerate(_coordinate(src, mesh)):
        group = mesh.get_group(axis)
        if isinstance(spread[axis], Shard):
            part = _scatter(part, layout, rank, group, source)
        else:
            dist.broadcast(part, group=group, group_src=source)
    return part


def _scatter(full: Tensor, layout: Layout, rank: int, group: dist.ProcessGroup, source: int) -> Tensor:
    """This rank's part of what `source` holds. Equal parts travel: the last ones are padded."""
    shape = list(full.shape)
    shape[layout.dim] = layout.chunk
    parts = []
    if rank == source:
        for r in range(layout.shards):
            padded = full.new_zeros(shape)
            begin, end = layout.rows(r)
            padded.narrow(layout.dim, 0, end - begin).copy_(layout.part(full, r))
            parts.append(padded)
    mine = full.new_empty(shape)
    dist.scatter(mine, parts or None, group=group, group_src=source)
    begin, end = layout.rows(rank)
    return mine.narrow(layout.dim, 0, end - begin).clone(memory_format=torch.contiguous_format)


def _check_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """With `src_data_rank=None` the ranks must hold equal values; compare a digest of each tensor."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # Another tool's parts differ.
    mine = {name: _digest(t) for name, t in tensors if not (isinstance(t, DTensor) or is_distributed_weight(t))}
    known = {dist.get_rank(): mine}
    for group in mesh.get_all_groups():  # one mesh dim after the other, so that in the end all know all, and all raise
        if group.size() > 1 and not is_fake(group):
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, known, group=group)
            known = {rank: digests for theirs in everyone for rank, digests in theirs.items()}
    first, *others = sorted(known)
    for name in mine:
        odd = [rank for rank in others if known[rank].get(name) != known[first].get(name)]
        if odd:
            raise ValueError(
                f"{name}: its values on rank(s) {odd} differ from those on rank {first}; seed the ranks alike, or let "
                "shard send one rank's values to all with src_data_rank=0"
            )


def _digest(t: Tensor) -> str:
    data = t.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes() + str((tuple(t.shape), t.dtype)).encode()).hexdigest()


def _swap_classes(model: nn.Module) -> None:
    tree = Tree()
    for module in model.modules():
        take_over(module, tree, module is model)
        if isinstance(module, GroupedLinear):
            _report_plain_leaders(module)


def _placed_names(model: nn.Module) -> list[str]:
    params = model.named_parameters(remove_duplicate=False)
    return [name for name, p in params if isinstance(p, ShardedParameter)]


def _report_plain_leaders(module: GroupedLinear) -> None:
    placed = leaves_in(module)
    for leader, *followers in module.discrete_groups():
        odd = [placed[name].fqn for name in followers if name in placed]
        if leader not in placed and odd:
            log.warning(
                "%s: is placed, but the leader of its weight group (%s) is not, so they form no distributed group: "
                "each placed weight is gathered and reduced by itself, and nothing reduces the plain ones",
                odd[0], leader,
            )  # fmt: skip
