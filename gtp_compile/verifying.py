"""`verify`: hold a training step's weight gradients against float64, group by group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from gtp_compile.parameters import ComputeLeaf, local_of
from gtp_compile.report import Row, hooked_rows, rows_of, split_rows, table
from gtp_compile.session import Session
from gtp_compile.sharding import leaves_of
from gtp_compile.watched import loss_of, preserved_state, run_watched, unwrap

__all__ = ["Verification", "verify"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` measured; print it, or take `to_dict()`. Rows as in `gtp_compile.report.Row`, with `error`."""

    groups: list[Row]
    others: list[Row]

    def __str__(self) -> str:
        parts = []
        for title, rows in (("GEMM weight groups", self.groups), ("Other weights", self.others)):
            parts += [title, table(rows, {"error": [r.error for r in rows]}), ""]
        return "\n".join(parts).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"groups": [r.to_dict() for r in self.groups], "others": [r.to_dict() for r in self.others]}


def verify(
    model: nn.Module, loss_fn: Callable[[Any], Tensor] | None = None, *, options: dict[str, Any] | None = None
) -> Callable[..., Verification]:
    """Run one step of `model`, compiled afresh, and compare each group's gradient with float64.

    The reference takes the operands that the step's own GEMMs (or reductions) read, computes the gradient in float64,
    and reduces it over the ranks in float64. The error is that of main_grad's change (of `.grad`'s, where there is no
    main_grad): `||got - reference|| / ||reference||` in the Frobenius norm, over the whole weight; absolute where the
    reference is zero. So it holds what the wgrad GEMM, the wire, the sum and the accumulation lose.

    Collective: every rank calls it with its own batch. main_grad, `.grad`, buffers and random state are restored
    bitwise.

    Args:
        model: a sharded model, compiled or not.
        loss_fn: makes the scalar loss of the model's output; default: its `loss`, or the output itself.
        options: the backend's options; `{"disable": ["retype_wgrads"]}` shows what is lost without retyping.

    Returns:
        A function to call with the model's arguments.
    """

    def run(*args: Any, **kwargs: Any) -> Verification:
        leaves = leaves_of(unwrap(model))
        with preserved_state(model):
            for leaf in leaves:
                leaf.registered.grad = None
                if leaf.main_grad is not None:
                    leaf.main_grad.zero_()  # what is in it afterwards is the step's own
            with recording(unwrap(model)) as recorded:
                output = run_watched(model, recorded.session, options, args, kwargs)
                with torch.enable_grad():
                    loss_of(output, loss_fn).backward()
            rows = recorded.rows()
        return Verification(*split_rows([*rows, *hooked_rows(recorded.session, unwrap(model))]))

    return run


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Have every backward of `model` record its gradients' operands, in graphs compiled under the session given."""
    leaves = leaves_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    recorded = Recording(leaves, Session(record=True, keep_text=False, names=names))
    for leaf in leaves:
        leaf.recorder = recorded
    try:
        yield recorded
    finally:
        for leaf in leaves:
            leaf.recorder = None


@dataclass(slots=True)
class Recording:
    """The operands of every gradient, from the graphs' `gtp::record`: what `leaf.recorder` is called with."""

    leaves: list[ComputeLeaf]
    session: Session
    calls: dict[str, list[tuple[int, list[Tensor]]]] = field(default_factory=dict)

    def __call__(self, shard: ComputeLeaf, program: int, operands: list[Tensor]) -> None:
        self.calls.setdefault(shard.fqn, []).append((program, [o.clone() for o in operands]))

    def rows(self) -> list[Row]:
        """All groups, with the errors of what was added since the recording began to main_grads of zero. Collective."""
        by_name = {leaf.fqn: leaf for leaf in self.leaves}
        rows = rows_of(self.session, self.leaves)
        for row in rows:
            if row.leader in self.calls:
                members = [by_name[n] for n in row.weights]
                row.error = _error(members, self.calls[row.leader], self.session.programs)
        return rows


@torch.no_grad()
def _error(leaves: list[ComputeLeaf], calls: list[tuple[int, list[Tensor]]], programs: list[fx.Graph]) -> float:
    """Relative Frobenius error of a group's change of main_grad, over all members and ranks."""
    layout, mesh = leaves[0].mesh_layout, leaves[0].registered.device_mesh
    full = sum(_Float64Run(programs[p]).run(*operands) for p, operands in calls)
    assert isinstance(full, Tensor)
    groups = mesh.get_all_groups()
    for group in groups:
        dist.all_reduce(full, group=group)
    if layout.reduce_op == "avg":
        full /= layout.ranks
    squares = torch.zeros(2, dtype=torch.float64, device=full.device)
    members = full.unbind(0) if len(leaves) > 1 else [full]
    for leaf, member in zip(leaves, members, strict=True):
        if leaf.requires_grad:
            want, got = layout.part(member, leaf.shard_rank), _change(leaf)
            squares += torch.stack([(got - want).square().sum(), want.square().sum()])
    for group in groups:  # shards add up; replicas count the same numbers several times, above and below the line
        dist.all_reduce(squares, group=group)
    difference, reference = (math.sqrt(s) for s in squares.tolist())
    return difference / reference if reference else difference


def _change(leaf: ComputeLeaf) -> Tensor:
    if leaf.main_grad is not None:
        return leaf.main_grad.double()
    grad = leaf.registered.grad
    return torch.zeros_like(leaf, dtype=torch.float64) if grad is None else local_of(grad).double()


class _Float64Run(fx.Interpreter):
    """Run a gradient's chain with every floating-point value in float64."""

    def __init__(self, program: fx.Graph) -> None:
        super().__init__(fx.GraphModule({}, program))

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().placeholder(target, args, kwargs)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gtp = torch.ops.gtp
        if target is torch.ops.prims.convert_element_type.default or target is torch.ops.aten._to_copy.default:
            return args[0]
        if target is gtp.dense_wgrad.default:
            return args[0].mT @ args[1]
        if target is gtp.grouped_wgrad.default:
            return _grouped_wgrad(*args[:3])
        if target is torch.ops.aten._grouped_mm.default:
            return _grouped_wgrad(args[0].t(), args[1], args[2])
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        return super().call_function(target, args, kwargs)


def _grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return torch.stack([dy[a:b].t() @ x[a:b] for a, b in zip(starts, ends, strict=True)])
