"""The two faces of a sharded weight: the registered parameter (a DTensor) and the compute leaf that graphs see.

    module.parameters() ---> ShardedParameter   DTensor, logical global shape; optimizer, norm, state_dict, init
                                  | same storage
    materialize anchor  <--- ComputeLeaf        plain tensor, local shape; autograd's leaf, bears the protocol
                                  |
                             main_grad          local shape, the accumulator; `ShardedParameter.grad` is a DTensor
                                                over its memory where the dtypes agree

A compiled backward adds to `main_grad` in place and returns no gradient. Everything else that reaches the leaf comes
through `collect`, its post-accumulate hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gtp_compile._compat import mark_static
from gtp_compile.accumulation import alias, collect, deliver, fold, grad_part, like, local_of, prepare_accumulation
from gtp_compile.meeting import Meeting
from gtp_compile.passes.anchors import materialize
from gtp_compile.passes.collective_ops import Layout, emit_reduce, emit_stack
from gtp_compile.passes.emit import RunEmit
from gtp_compile.weights import weight_grad_dtype
from gtp_compile.whole_values import WholeValues

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "ComputeLeaf",
    "ExpertList",
    "ShardedParameter",
    "attach_main_grad",
    "check_conversion",
    "check_main_grad_dtype",
    "grad_part",
    "is_narrow",
    "like",
    "local_of",
    "materialize_leaves",
    "pair",
    "prepare_accumulation",
    "renewed",
    "take_attributes",
]


@dataclass(frozen=True, slots=True)
class ExpertList:
    """A list of experts that are modules of their own: its qualified name, and how many placed weights it has."""

    fqn: str
    count: int


class ComputeLeaf(nn.Parameter):
    """This rank's part of a weight, as compiled graphs and autograd see it; implements `DistributedWeight`.

    Attributes:
        fqn: qualified name of the registered parameter.
        mesh_layout: where the parts live (`layout` is a tensor attribute).
        shard_rank: this rank's number in the group that holds the shards (0 where replicated).
        param_dtype: dtype in which the weight is gathered and computed with.
        main_grad: accumulator of the local shape, or None.
        main_grad_dtype: of the accumulator that it gets when it, or its group, is first trained; None: it has had its.
        group: the leaves of the weight group, leader first (a group of one but for discrete grouped weights).
        meeting: where ranks meet before a forward without gradients.
        holders: the modules that registered the parameter, and under which names.
        experts: the list of experts to which it belongs, if any.
        scope: the eager forward that is running and holds its whole weight (see `eager_forward`).
        kept: the whole weights that such forwards left for their backward.
        replacement: the pair that a conversion of the module put in this one's place.
        eager_uses: how many gradients arrived outside compiled graphs.
        compiled_uses: how many compiled graphs ran with it.
    """

    is_distributed_weight = True

    fqn: str
    mesh_layout: Layout
    param_dtype: torch.dtype
    shard_rank: int
    main_grad: Tensor | None
    main_grad_dtype: torch.dtype | None
    group: tuple[ComputeLeaf, ...]
    eager_uses: int
    compiled_uses: int
    recorder: Any  # called by gtp::record (verify)
    emit: Any  # how collectives run outside compiled graphs (explain)
    rounding_reported: bool
    replacement: ShardedParameter | None
    meeting: Meeting | None
    experts: ExpertList | None
    scope: Any  # an eager_forward.EagerForward
    kept: weakref.WeakSet[Any]  # of gathered.Gathered
    holders: set[tuple[weakref.ref[nn.Module], str]]
    _registered: weakref.ref[ShardedParameter]
    _aliased: Tensor | None

    @property
    def registered(self) -> ShardedParameter:
        """The parameter that the user's module holds."""
        param = self._registered()
        assert param is not None, f"{self.fqn}: the registered parameter is gone, its compute leaf is still used"
        return param

    def check_use(self) -> None:
        """Refuse a use that would read the wrong tensor.

        Raises:
            RuntimeError: a module holds another tensor in the parameter's place.
        """
        for module_ref, name in self.holders:
            module = module_ref()
            held: Any = None if module is None else module._parameters.get(name)
            if module is not None and held is not self._registered():
                raise RuntimeError(
                    f"{self.fqn}: another tensor stands in its place (functional_call?), but a sharded weight is "
                    "gathered from its own shard; write the values into the parameter instead"
                )

    def meet(self) -> None:
        """Before a forward without gradients: see that all ranks are there.

        Raises:
            RuntimeError: a rank evaluates alone.
        """
        if self.meeting is not None and not torch.is_grad_enabled():
            self.meeting.wait_once(self.fqn)

    # The protocol (weights.DistributedWeight), for code that works with weights instead of graphs.

    def materialize_group_for_forward(self) -> list[Tensor]:
        full = materialize_leaves(self.group)
        return list(full.unbind(0)) if len(self.group) > 1 else [full]

    def materialize_group_for_backward(self) -> list[Tensor]:
        with torch.no_grad():
            return self.materialize_group_for_forward()

    def finalize_group_grads(self, wgrads: Tensor | Sequence[Tensor | None]) -> None:
        """Reduce the group's full gradients and add them to their accumulators; nothing is left to return.

        A member that is frozen, or whose gradient is None, is left out (on all ranks alike).
        """
        grads = list(wgrads) if isinstance(wgrads, list | tuple) else [wgrads]
        if len(grads) != len(self.group):
            raise ValueError(f"{self.fqn}: {len(self.group)} gradients expected, one a member; got {len(grads)}")
        wanted = [(leaf, g) for leaf, g in zip(self.group, grads, strict=True) if g is not None and leaf.requires_grad]
        if not wanted:
            return
        leaves = [leaf for leaf, _ in wanted]
        grad = emit_stack(RunEmit(), [g for _, g in wanted])
        dtype = weight_grad_dtype(self, grad.dtype)
        with torch.no_grad():
            reduced = emit_reduce(RunEmit(), grad, leaves, self.mesh_layout, dtype)
            for leaf, part in zip(leaves, reduced, strict=True):
                deliver(leaf, part)

    def grad_buffer(self) -> Tensor:
        """Scratch of the full weight's shape, in the dtype that the reduction uses."""
        return torch.empty(
            self.registered.shape, dtype=weight_grad_dtype(self.group[0], self.param_dtype), device=self.device
        )


class ShardedParameter(WholeValues):
    """A registered parameter: a DTensor that keeps its compute leaf in step.

    Made by `pair`, which gives this class to an `nn.Parameter` over a DTensor. Operators on it return plain DTensors.
    """

    __slots__ = ()

    @property
    def main_grad(self) -> Tensor | None:
        """The accumulator (local shape). Assigning another one, or None, takes effect at the next step."""
        return self.leaf.main_grad

    @main_grad.setter
    def main_grad(self, value: Tensor | None) -> None:
        if value is not None and value.shape != self.leaf.shape:
            raise ValueError(
                f"{self.leaf.fqn}: main_grad has the local shape {tuple(self.leaf.shape)}, got {tuple(value.shape)}; "
                "give each rank's part, not the whole weight's"
            )
        if value is not None:
            check_main_grad_dtype(value.dtype, self.leaf.fqn)
        _fix_sizes(value)
        self.leaf.main_grad = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return bool(torch._C.TensorBase.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        torch._C.TensorBase.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        leaf = self.leaf
        leaf.requires_grad = value
        if value:
            for member in leaf.group:  # the leader's speaks for all, also where it is frozen
                attach_main_grad(member)
        if value and not leaf._post_accumulate_grad_hooks:  # a hook needs a leaf that requires grad
            leaf.register_post_accumulate_grad_hook(collect)
            self.register_post_accumulate_grad_hook(fold)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> WholeValues:  # type: ignore[override]
        values = torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]
        values.__class__, values.leaf = WholeValues, self.leaf
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        """Takes the values, into the memory that the leaf shares."""
        if value.dtype != self.dtype:
            raise TypeError(f"{self.leaf.fqn}: values of dtype {self.dtype} expected, got {value.dtype}")
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) in memo:
            return memo[id(self)]
        memo[id(self)] = new = _another(self, self.leaf.detach().clone())
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        leaf = self.leaf
        # As for any parameter, gradients aren't saved: the accumulator starts from zero.
        main_grad = None if leaf.main_grad is None else torch.empty_like(leaf.main_grad, device="meta")
        facts = (leaf.fqn, leaf.mesh_layout, leaf.param_dtype, self.requires_grad, leaf.main_grad_dtype, leaf.experts)
        return _unpickled, (self.detach(), facts, main_grad), None

    def register_hook(self, hook: Any) -> Any:
        raise NotImplementedError(
            f"{self.leaf.fqn}: the gradient of a sharded parameter goes to main_grad inside the backward, past tensor "
            "hooks; use register_post_accumulate_grad_hook, which fires when main_grad is final"
        )


def attach_main_grad(leaf: ComputeLeaf) -> None:
    """Give a weight that is going to be trained the accumulator that `shard` promised; once: None may be wanted."""
    dtype, leaf.main_grad_dtype = leaf.main_grad_dtype, None
    if dtype is not None and leaf.main_grad is None:
        leaf.registered.main_grad = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)


def pair(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    fqn: str,
    layout: Layout,
    shard_rank: int,
    global_shape: torch.Size,
    requires_grad: bool,
    param_dtype: torch.dtype,
    main_grad_dtype: torch.dtype | None,
) -> ShardedParameter:
    """The registered parameter over `local` (this rank's part, contiguous), with its leaf and main_grad attached."""
    stride = torch.empty(global_shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=global_shape, stride=stride)
    param: Any = nn.Parameter(dtensor, requires_grad=False)
    # A DTensor subclass can't be handed to nn.Parameter: detach() returns a plain DTensor.
    param.__class__ = ShardedParameter
    leaf = torch.Tensor._make_subclass(ComputeLeaf, param.to_local().detach(), False)
    leaf.fqn, leaf.mesh_layout, leaf.shard_rank, leaf.param_dtype = fqn, layout, shard_rank, param_dtype
    leaf.main_grad, leaf.main_grad_dtype = None, main_grad_dtype
    leaf.group, leaf.eager_uses, leaf.compiled_uses, leaf.rounding_reported = (leaf,), 0, 0, False
    leaf.recorder, leaf.emit, leaf.replacement, leaf.holders = None, None, None, set()
    leaf.meeting = Meeting.of(mesh)
    leaf.experts, leaf.scope, leaf.kept = None, None, weakref.WeakSet()
    leaf._registered, leaf._aliased = weakref.ref(param), None
    _fix_sizes(leaf)
    param.leaf = leaf
    param.requires_grad = requires_grad
    # A gradient that is already in main_grad's dtype must not be rounded to the leaf's on its way.
    leaf.grad_dtype = None
    return param


def _another(param: ShardedParameter, local: Tensor) -> ShardedParameter:
    """A pair placed as `param` is, over `local`, with copies of its gradients."""
    leaf, grad = param.leaf, param.grad

    def copied(t: Tensor) -> Tensor:
        if t.is_meta or local.is_meta:  # nothing is known of it
            return torch.zeros_like(t, device=local.device)
        return torch.empty_like(t, device=local.device).copy_(t)

    new = pair(
        local,
        param.device_mesh,
        param.placements,
        fqn=leaf.fqn,
        layout=leaf.mesh_layout,
        shard_rank=leaf.shard_rank,
        global_shape=param.shape,
        requires_grad=param.requires_grad,
        param_dtype=leaf.param_dtype,
        main_grad_dtype=None,
    )
    take_attributes(new, param)  # type: ignore[arg-type]
    new.leaf.main_grad_dtype, new.leaf.experts = leaf.main_grad_dtype, leaf.experts
    if leaf.main_grad is not None:
        aliased = leaf._aliased is leaf.main_grad
        dropped = aliased and grad is None  # zero_grad: the next step would start from zero
        new.main_grad = copied(leaf.main_grad)
        if dropped:
            new.main_grad.zero_()
        if aliased and grad is not None and local_of(grad).data_ptr() == leaf.main_grad.data_ptr():
            alias(new.leaf, new.main_grad)
            grad = None
    if grad is not None:
        new.grad = like(new, copied(local_of(grad)))
    return new


def take_attributes(new: ShardedParameter, old: nn.Parameter) -> None:
    """What the user hung on a parameter: attributes, and hooks that wait for its gradient."""
    for name, value in vars(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    hooks = [hook for hook in (old._post_accumulate_grad_hooks or {}).values() if hook is not fold]
    is_trained = new.requires_grad
    new.requires_grad = is_trained or bool(hooks)  # else no hook may be registered
    for hook in hooks:
        new.register_post_accumulate_grad_hook(hook)
    new.requires_grad = is_trained


def check_conversion(leaf: ComputeLeaf, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion of a module (`Module._apply`) that its shard can't follow.

    Raises:
        TypeError: the conversion changes the dtype: the shards are the masters of what is trained.
        ValueError: it goes to another kind of device than the mesh's.
    """
    to = fn(torch.empty(0, dtype=leaf.dtype, device=leaf.device))
    if to.dtype != leaf.dtype:
        raise TypeError(
            f"{leaf.fqn}: its shard is {leaf.dtype}, and stays so (it is what the optimizer trains); to compute in "
            f"{to.dtype}, give it to gtp_compile.shard as param_dtype, or convert the model before"
        )
    device = leaf.registered.device_mesh.device_type
    if to.device.type not in (device, "meta"):
        raise ValueError(f"{leaf.fqn}: lives on a mesh of {device} devices, can't move to {to.device}")


def renewed(param: ShardedParameter, fn: Callable[[Tensor], Tensor]) -> ShardedParameter:
    """`param` after a conversion of the module that holds it: itself, or a pair over other memory."""
    leaf = param.leaf
    if leaf.replacement is not None:  # tied: another module's conversion came first
        return leaf.replacement
    local = fn(leaf.detach())
    if local.device == leaf.device and (local.is_meta or local.data_ptr() == leaf.data_ptr()):
        return param
    leaf.replacement = _another(param, local.detach().contiguous())
    return leaf.replacement


def _unpickled(dtensor: DTensor, facts: tuple[Any, ...], main_grad: Tensor | None) -> ShardedParameter:
    fqn, layout, param_dtype, requires_grad, main_grad_dtype, experts = facts
    mesh = dtensor.device_mesh
    axes = [a for a, p in enumerate(dtensor.placements) if isinstance(p, Shard)]
    order = axes + [a for a in range(mesh.ndim) if a not in axes]
    names = tuple(mesh.get_group(a).group_name for a in order)  # groups have other names in another process
    new = pair(
        dtensor.to_local(),
        mesh,
        dtensor.placements,
        fqn=fqn,
        layout=replace(layout, group_names=names),
        shard_rank=mesh.get_local_rank(axes[0]) if axes else 0,
        global_shape=dtensor.shape,
        requires_grad=requires_grad,
        param_dtype=param_dtype,
        main_grad_dtype=None,
    )
    new.main_grad = None if main_grad is None else torch.zeros_like(main_grad, device=new.leaf.device)
    new.leaf.main_grad_dtype, new.leaf.experts = main_grad_dtype, experts
    return new


def is_narrow(param: Any) -> bool:
    """Whether a parameter's gradient lives in a main_grad of another dtype, where a stock optimizer does not look."""
    main_grad = param.main_grad if isinstance(param, ShardedParameter) else None
    return main_grad is not None and main_grad.dtype != param.dtype


def check_main_grad_dtype(dtype: torch.dtype, name: str) -> None:
    """Refuse an accumulator that no kernel writes for."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: main_grad is float32, bfloat16 or float16, got {dtype}; use torch.float32")


def _fix_sizes(t: Tensor | None) -> None:
    """Keep Dynamo from making a weight's sizes symbolic when it meets a layer of another size in the same code."""
    if t is not None:
        mark_static(t)


def materialize_leaves(leaves: tuple[ComputeLeaf, ...]) -> Tensor:
    """The full weight(s) of a group through the anchor op: traced into a graph, or gathered now."""
    leader = leaves[0]
    # Read here, in the forward that Dynamo traces: presence, dtype and shape of main_grad become guards.
    main_grads = [getattr(leaf, "main_grad", None) if leaf.requires_grad else None for leaf in leaves]
    grad_dtype = weight_grad_dtype(leader, leader.param_dtype)
    return materialize(leaves, main_grads, leader.mesh_layout, leader.param_dtype, grad_dtype)
