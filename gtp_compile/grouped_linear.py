"""`GroupedLinear`, several linear layers with TransformerEngine's parameter names, and `Linear`, one.

Both ask the protocol hooks of weights that another tool has distributed (see `hooked_ops`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_compile.hooked_ops import hooked_linear
from gtp_compile.kernels import grouped_linear
from gtp_compile.parameters import materialize_leaves
from gtp_compile.weights import is_distributed_weight

__all__ = ["GroupedLinear", "Linear"]


class GroupedLinear(nn.Module):
    """`num_gemms` linear layers, each on its own run of consecutive rows of one input.

    The parameters are named as TransformerEngine's: `weight0`, `weight1`, ... of `[out_features, in_features]`, or one
    `weight` of `[num_gemms, out_features, in_features]` with `single_grouped_weight=True`; `bias0`, `bias1`, ... of
    `[out_features]`. Discrete weights form one weight group with the leader `weight0`: sharded, they cost one gather
    and one reduce-scatter. Where only `weight0` is placed, it is the group's leader all the same, and the followers
    stay plain (nothing reduces their gradients).

    A weight may be replaced after construction by another tool's implementer of `DistributedWeight`: `op.weight0 =
    theirs`. The leader's hooks then act for the whole group, whose other members may be plain.

    Args:
        num_gemms: number of layers (experts).
        in_features, out_features: width of each.
        bias: whether each layer has a bias.
        device, dtype: of the parameters.
        single_grouped_weight: keep one stacked weight instead of `num_gemms` discrete ones.
        params_dtype: TransformerEngine's other name for `dtype`.
        fuse_wgrad_accumulation, accumulate_into_main_grad, delay_wgrad_compute: TransformerEngine's; False only.

    Raises:
        ValueError: an option that is not supported; the message says why, and the way out.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = False,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        _refuse_options(fuse_wgrad_accumulation, accumulate_into_main_grad, delay_wgrad_compute)
        if dtype is not None and params_dtype is not None and dtype != params_dtype:
            raise ValueError(f"dtype is {dtype}, but params_dtype {params_dtype}; give one of them")
        dtype = params_dtype if dtype is None else dtype
        if num_gemms < 1:
            raise ValueError(f"num_gemms: at least 1 is expected, got {num_gemms}")
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        if single_grouped_weight:
            self.weight = new(num_gemms, out_features, in_features)
        else:
            for i in range(num_gemms):
                self.register_parameter(f"weight{i}", new(out_features, in_features))
        if bias:
            for i in range(num_gemms):
                self.register_parameter(f"bias{i}", new(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each layer as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for param in self.parameters():
            if not param.is_meta:
                nn.init.uniform_(param, -bound, bound)

    def discrete_groups(self) -> list[list[str]]:
        """Names of the parameters that form one weight group each, leader first."""
        groups = [] if self.single_grouped_weight else [[f"weight{i}" for i in range(self.num_gemms)]]
        return [*groups, [f"bias{i}" for i in range(self.num_gemms)]] if self.use_bias else groups

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        """Apply layer `e` to its rows.

        Args:
            x: `[R, in_features]`; the rows of layer 0 first, then those of layer 1, and so on.
            m_splits: rows of each layer, a list of ints or an integer tensor `[num_gemms]` (which stays on the
                device). Rows past their sum are never read, and zero in the result.

        Returns:
            `[R, out_features]` in x's dtype.
        """
        offs = self._offsets(x, m_splits)
        x, autocast = _autocast(x)
        members = self._hooked_members()
        if members:
            y = hooked_linear(x, members, offs, self.out_features, cast=autocast)
        else:
            weight = self._stacked("weight")
            y = grouped_linear(x, weight.to(x.dtype) if autocast else weight, offs)
        if not self.use_bias:
            return y
        rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
        layer = torch.searchsorted(offs, rows, right=True).clamp(max=self.num_gemms - 1)
        # Selected, not multiplied by a mask: what comes back for rows past the last offset may be NaN.
        owned = (rows < offs[-1]).unsqueeze(-1)
        return y + torch.where(owned, self._stacked("bias").to(y.dtype).index_select(0, layer), 0)

    def _offsets(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x: [rows, {self.in_features}] is expected, got {tuple(x.shape)}")
        count = m_splits.numel() if isinstance(m_splits, Tensor) else len(m_splits)
        if count != self.num_gemms:
            raise ValueError(f"m_splits: {self.num_gemms} counts are expected, one a layer; got {count}")
        if not isinstance(m_splits, Tensor):
            if sum(m_splits) > x.shape[0]:
                raise ValueError(f"m_splits: sum to {sum(m_splits)} rows, but x has {x.shape[0]}")
            m_splits = torch.tensor(m_splits, device=x.device)
        elif m_splits.is_floating_point():
            raise TypeError(f"m_splits: integers are expected, got {m_splits.dtype}")
        return m_splits.to(x.device).cumsum(0).to(torch.int32)

    def _hooked_members(self) -> list[Tensor]:
        """The weight group, leader first, where another tool distributes it; else nothing.

        Raises:
            ValueError: a member bears the protocol, and the group is no distributed group of one tool.
        """
        ours: dict[str, Any] = self.__dict__.get("_gtp_leaves", {})  # whose attributes gather when they are read
        groups = self.discrete_groups()
        names = ["weight"] if self.single_grouped_weight else groups[0]
        for name in [n for group in groups for n in group if n not in names and n not in ours]:
            if is_distributed_weight(getattr(self, name)):
                raise ValueError(
                    f"{name}: bears the distributed-weight protocol, but biases are read whole; keep biases plain, or "
                    "place them with gtp_compile.shard"
                )
        theirs = [n for n in names if n not in ours and is_distributed_weight(getattr(self, n))]
        if not theirs:
            return []
        if theirs[0] != names[0]:
            raise ValueError(
                f"{theirs[0]}: bears the distributed-weight protocol, but the leader of its group, {names[0]}, does "
                f"not, so nobody would materialize it; make {names[0]} the implementer that speaks for the group"
            )
        if placed := [n for n in names if n in ours]:
            raise ValueError(
                f"{placed[0]}: is placed by gtp_compile.shard, but the leader of its group, {names[0]}, belongs to "
                f"another tool ({type(getattr(self, names[0])).__name__}); let shard_fn return None for it"
            )
        return [getattr(self, n) for n in names]

    def _stacked(self, kind: str) -> Tensor:
        """The layers' weights as `[num_gemms, out, in]`, or biases as `[num_gemms, out]`."""
        if kind == "weight" and self.single_grouped_weight:
            return self.weight
        members = [f"{kind}{i}" for i in range(self.num_gemms)]
        leaves: dict[str, Any] = self.__dict__.get("_gtp_leaves", {})
        leader = leaves.get(members[0])
        is_scoped = not torch.compiler.is_compiling() and leader is not None and leader.scope is not None
        if leader is not None and len(leader.group) == self.num_gemms > 1 and not is_scoped:
            return materialize_leaves(leader.group)
        return torch.stack([getattr(self, name) for name in members])

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, single_grouped_weight={self.single_grouped_weight}"
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` that asks the hooks of a weight which another tool has distributed.

    Torch's own multiplies by the weight as it is, and a distributed weight is a shard. `gtp_compile.shard` gives this
    class to an `nn.Linear` with such a weight; elsewhere build it, or assign it: `module.__class__ = Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias  # read once: the weight of a sharded module is gathered here
        if bias is not None and is_distributed_weight(bias):
            raise ValueError("bias: bears the distributed-weight protocol, but biases are read whole; keep it plain")
        if not is_distributed_weight(weight):
            return nn.functional.linear(input, weight, bias)
        x, autocast = _autocast(input.reshape(-1, self.in_features))
        y = hooked_linear(x, [weight], None, self.out_features, cast=autocast)
        if bias is not None:
            y = y + bias.to(y.dtype)
        return y.reshape(*input.shape[:-1], self.out_features)


def _autocast(x: Tensor) -> tuple[Tensor, bool]:
    """`x` as torch's own linear takes it under autocast, and whether autocast is on."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, False
    return x.to(torch.get_autocast_dtype(x.device.type)), True


def _refuse_options(fuse_wgrad_accumulation: bool, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
    if delay_wgrad_compute:
        raise ValueError(
            "delay_wgrad_compute: is not supported. The gradients of a distributed weight group are reduced in the "
            "backward that computes them, so that all ranks communicate in one order; a wgrad that is put off to a "
            "schedule of the trainer's would move its reduction out of that order. Use False"
        )
    for name, value in (
        ("fuse_wgrad_accumulation", fuse_wgrad_accumulation),
        ("accumulate_into_main_grad", accumulate_into_main_grad),
    ):
        if value:
            raise ValueError(
                f"{name}: is no option of the module. A distributed weight's gradient is never added to its (sharded) "
                "main_grad by the GEMM; for plain weights use torch.compile(model, backend='gtp', "
                "options={'accumulate_into_main_grad': True})"
            )
