"""The distributed-weight protocol and the dtype rule of weight gradients.

A *weight group* is the ordered list of weights that one (grouped) linear reads; a dense weight is a group of one. The
first weight is the *leader* and speaks for the group. A weight is *distributed* when it bears the protocol: its memory
holds a shard, and the group materializes the full weights before a GEMM and finalizes the full gradients after one. Any
other weight is *plain*.

A distributed gradient is summed over ranks before it reaches `main_grad`, so what the sum loses, `main_grad` cannot
bring back: the wgrad GEMM has to write `main_grad`'s dtype already. `weight_grad_dtype` is that rule, and the only
place that reads `main_grad` for a dtype.

The names and the calling convention are those of TransformerEngine's weight-parallel protocol (its pull request 3397),
so that an implementer written for it works here. Every function takes a bare weight or a list or tuple of weights.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch

Weights: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
WeightGrads: TypeAlias = torch.Tensor | Sequence[torch.Tensor | None] | None


@runtime_checkable
class DistributedWeight(Protocol):
    """What a weight offers to take part; implementers are `torch.Tensor` subclasses.

    A hook of the leader answers for its whole group: one tensor for a group of one, else one entry per member in the
    group's order.
    """

    is_distributed_weight: bool
    """The marker; a weight without it, or with a false one, is plain."""

    def materialize_group_for_forward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """Return the full weight(s) that the forward GEMM reads, in the compute dtype."""
        ...

    def materialize_group_for_backward(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """Return the full weight(s) that the backward GEMMs read, in the compute dtype."""
        ...

    def finalize_group_grads(self, wgrads: WeightGrads) -> WeightGrads:
        """Take the full gradient(s) and return what autograd gets: gradients, dummies, or None when reduced later."""
        ...

    def grad_buffer(self) -> torch.Tensor:
        """Return this member's own full-shape buffer, for its wgrad GEMM to write."""
        ...


def is_distributed_weight(weight: object) -> bool:
    """Tell whether `weight` bears the protocol.

    Raises:
        TypeError: the marker stands on something that is not a tensor. Autograd could not hand it a gradient.
    """
    marked = bool(getattr(weight, "is_distributed_weight", False))
    if marked and not isinstance(weight, torch.Tensor):
        raise TypeError(
            f"is_distributed_weight is set on a {type(weight).__name__}; expected a torch.Tensor subclass. "
            "Implement the protocol on the parameter itself, not on a wrapper around it."
        )
    return marked


def materialize_weight_for_forward(weights: Weights) -> list[torch.Tensor]:
    """Return the full weights for the forward GEMM, one per member.

    A distributed leader is asked once for the whole group and its followers are not touched; plain weights come back
    as they are.

    Raises:
        RuntimeError: the leader of a listed group returned another number of weights than the group has.
        ValueError: `weights` is empty.
    """
    group = _as_group(weights)
    leader = _distributed_leader(group)
    if leader is None:
        return group
    return _materialized(group, leader.materialize_group_for_forward())


def materialize_weight_for_backward(weights: Weights) -> list[torch.Tensor]:
    """Return the full weights for the backward GEMMs; the contract of `materialize_weight_for_forward`."""
    group = _as_group(weights)
    leader = _distributed_leader(group)
    if leader is None:
        return group
    return _materialized(group, leader.materialize_group_for_backward())


def finalize_weight_grads(weights: Weights, wgrads: WeightGrads) -> list[torch.Tensor | None]:
    """Hand the full gradients to the group and return what autograd gets, one entry per gradient.

    `wgrads` holds one full-shape gradient per member, None where a member is frozen. A distributed leader receives
    them in one call (a single gradient bare, more as a list), and its followers are not touched. It may return
    gradients, dummies that only satisfy autograd, or a lone None when the reduction ends later: that is one None per
    gradient here. The gradients of plain weights come back as they are.

    Raises:
        RuntimeError: the leader returned another number of gradients than it was given.
        ValueError: `weights` is empty, or a distributed group was given another number of gradients than it has
            members. (A bare leader may stand for its whole group.)
    """
    group = _as_group(weights)
    grads = list(wgrads) if isinstance(wgrads, (list, tuple)) else [cast("torch.Tensor | None", wgrads)]
    leader = _distributed_leader(group)
    if leader is None:
        return grads
    if not grads or (len(group) > 1 and len(grads) != len(group)):
        raise ValueError(f"wgrads has {len(grads)} gradients for a group of {len(group)} weights; expected one each.")
    finalized = leader.finalize_group_grads(grads if len(grads) > 1 else grads[0])
    if finalized is None:
        return [None] * len(grads)
    result = list(finalized) if isinstance(finalized, (list, tuple)) else [cast("torch.Tensor | None", finalized)]
    if len(result) != len(grads):
        raise RuntimeError(
            f"finalize_group_grads of a {type(leader).__name__} returned {len(result)} gradients for {len(grads)}; "
            "expected one per member (a dummy or None where there is nothing to return), or None alone."
        )
    return result


def weight_grad_buffers(
    weights: Weights,
    weight_shape: Sequence[int],
    compute_dtype: torch.dtype,
    device: torch.device | str,
) -> list[torch.Tensor]:
    """Return one buffer of shape `weight_shape` per member, for the wgrad GEMM to write.

    In a distributed group each member that bears the protocol brings its own `grad_buffer()`, in the dtype it chose; a
    plain follower is asked for nothing and gets fresh scratch on `device` in `weight_grad_dtype` of the group. Without
    a distributed leader there is no distributed group: no hook is called, and every member gets scratch in
    `compute_dtype`. Scratch is not initialized.

    Raises:
        RuntimeError: a member brought no tensor or one of another shape, or two members brought memory that overlaps,
            or a member the memory of its own weight. A GEMM would write past the end of a shard, over another member's
            gradient, or over the weight.
        ValueError: `weights` is empty.
    """
    group = _as_group(weights)
    shape = tuple(weight_shape)
    if _distributed_leader(group) is None:
        return [torch.empty(shape, dtype=compute_dtype, device=device) for _ in group]
    scratch_dtype = weight_grad_dtype(group, compute_dtype)
    buffers: list[torch.Tensor] = []
    brought: list[tuple[int, torch.Tensor]] = []
    for index, weight in enumerate(group):
        if is_distributed_weight(weight):
            buffer = _checked_buffer(index, cast(DistributedWeight, weight).grad_buffer(), shape)
            brought.append((index, buffer))
        else:
            buffer = torch.empty(shape, dtype=scratch_dtype, device=device)
        buffers.append(buffer)
    # Dynamo cannot trace an address; an implementer that aliases its buffers is caught in eager.
    if not torch.compiler.is_compiling():
        _check_disjoint(brought)
        for index, buffer in brought:
            _check_apart(index, buffer, group[index])
    return buffers


def weight_grad_dtype(weights: Weights, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the group's wgrad GEMMs write.

    It is `main_grad`'s dtype where the leader is distributed and has a `main_grad`, else `compute_dtype`. Followers
    are never touched: one group has one wire dtype. A plain leader keeps `compute_dtype` whatever its `main_grad`
    holds, because nothing is summed over ranks on the way there. The answer is not kept: a `main_grad` that is
    attached or replaced later counts from the next call on, compiled or not.

    Raises:
        ValueError: `weights` is empty.
    """
    leader = _as_group(weights)[0]
    if is_distributed_weight(leader):
        main_grad = getattr(leader, "main_grad", None)
        if main_grad is not None:
            return main_grad.dtype
    return compute_dtype


def _as_group(weights: Weights) -> list[torch.Tensor]:
    group = list(weights) if isinstance(weights, (list, tuple)) else [cast(torch.Tensor, weights)]
    if not group:
        raise ValueError("weights is empty; expected at least the leader, or a bare weight.")
    return group


def _distributed_leader(group: list[torch.Tensor]) -> DistributedWeight | None:
    leader = group[0]
    return cast(DistributedWeight, leader) if is_distributed_weight(leader) else None


def _materialized(group: list[torch.Tensor], result: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    full = list(result) if isinstance(result, (list, tuple)) else [cast(torch.Tensor, result)]
    # A bare leader may stand for its whole group, so only a listed group has a length to hold it to.
    if len(group) > 1 and len(full) != len(group):
        raise RuntimeError(
            f"A {type(group[0]).__name__} materialized {len(full)} weights for a group of {len(group)}; "
            "expected one per member."
        )
    return full


def _checked_buffer(index: int, buffer: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(buffer, torch.Tensor):
        raise RuntimeError(
            f"Member {index} of the group brought a {type(buffer).__name__} from grad_buffer(); "
            f"the wgrad GEMM needs a tensor of shape {shape}."
        )
    if tuple(buffer.shape) != shape:
        raise RuntimeError(
            f"Member {index} of the group brought a gradient buffer of shape {tuple(buffer.shape)}; "
            f"the wgrad GEMM needs {shape}, the full weight's shape."
        )
    return buffer


def _check_disjoint(brought: list[tuple[int, torch.Tensor]]) -> None:
    """Raise when two of the brought buffers share memory."""
    spans = sorted((address, index, buffer) for index, buffer in brought if (address := _address(buffer)))
    for position, (_, index, buffer) in enumerate(spans):
        end = _end_address(buffer)
        for start, other_index, other in spans[position + 1 :]:
            if start >= end:
                break
            if buffer.device == other.device and _overlaps(buffer, other):
                first, second = sorted((index, other_index))
                raise RuntimeError(
                    f"Members {first} and {second} of the group brought gradient buffers that overlap in memory; "
                    "the wgrad GEMM needs one for each, or one gradient would overwrite the other."
                )


def _check_apart(index: int, buffer: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise when a brought buffer is (a view of) the weight's own memory."""
    apart = buffer.device != weight.device or not (_address(buffer) and _address(weight))
    if not apart and _overlaps(buffer, weight):
        raise RuntimeError(
            f"Member {index} of the group brought its own weight's memory from grad_buffer(); the wgrad GEMM needs "
            "memory of its own, or the gradient would overwrite the weight."
        )


def _address(buffer: torch.Tensor) -> int:
    """Return where the buffer starts, or 0 if it occupies no memory."""
    try:
        return buffer.data_ptr() if buffer.numel() else 0
    except RuntimeError:  # a fake tensor: its data_ptr raises
        return 0


def _end_address(buffer: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return buffer.data_ptr() + (last + 1) * buffer.element_size()


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two buffers have a byte in common, exactly.

    Column slices of one packed buffer interleave without overlapping, so comparing the address ranges is not enough.
    The question is whether the two byte positions can be equal, `start_a + sum(x_i * stride_i) = start_b + sum(y_j *
    stride_j)`, for indices within bounds.
    """
    ranges: dict[int, int] = {}  # stride in bytes -> sum of the index ranges that move by it
    for buffer in (a, b):
        width = buffer.element_size()
        steps = [(stride * width, size - 1) for size, stride in zip(buffer.shape, buffer.stride(), strict=True)]
        for stride, extent in [*steps, (1, width - 1)]:
            ranges[stride] = ranges.get(stride, 0) + extent
    terms = sorted(((stride, extent) for stride, extent in ranges.items() if stride and extent), reverse=True)
    # Mirroring b's indices (y -> size - 1 - y) turns the difference into a sum of non-negative terms.
    return _reachable(_end_address(b) - 1 - a.data_ptr(), terms)


def _reachable(target: int, terms: list[tuple[int, int]]) -> bool:
    """Tell whether `target` is a sum of `count * stride` with each count in `0..extent`; strides descend."""
    if not terms:
        return target == 0
    (stride, extent), rest = terms[0], terms[1:]
    reach = sum(stride * extent for stride, extent in rest)
    lowest = max(0, -((reach - target) // stride))
    highest = min(extent, target // stride)
    return any(_reachable(target - count * stride, rest) for count in range(lowest, highest + 1))
