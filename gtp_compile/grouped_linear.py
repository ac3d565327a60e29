"""`GroupedLinear`: several linear layers over consecutive rows, with TransformerEngine's parameter names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_compile.kernels import grouped_linear
from gtp_compile.parameters import materialize_leaves

__all__ = ["GroupedLinear"]


class GroupedLinear(nn.Module):
    """`num_gemms` linear layers, each on its own run of consecutive rows of one input.

    The parameters are named as TransformerEngine's: `weight0`, `weight1`, ... of `[out_features, in_features]`, or one
    `weight` of `[num_gemms, out_features, in_features]` with `single_grouped_weight=True`; `bias0`, `bias1`, ... of
    `[out_features]`. Discrete weights form one weight group with the leader `weight0`: sharded, they cost one gather
    and one reduce-scatter. Where only `weight0` is placed, it is the group's leader all the same, and the followers
    stay plain (nothing reduces their gradients).

    Args:
        num_gemms: number of layers (experts).
        in_features, out_features: width of each.
        bias: whether each layer has a bias.
        device, dtype: of the parameters.
        single_grouped_weight: keep one stacked weight instead of `num_gemms` discrete ones.
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
    ) -> None:
        super().__init__()
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
        weight = self._stacked("weight")
        if torch.is_autocast_enabled(x.device.type):  # as torch's own linear does it
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y = grouped_linear(x, weight, offs)
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

    def _stacked(self, kind: str) -> Tensor:
        """The layers' weights as `[num_gemms, out, in]`, or biases as `[num_gemms, out]`."""
        if kind == "weight" and self.single_grouped_weight:
            return self.weight
        members = [f"{kind}{i}" for i in range(self.num_gemms)]
        leaves: dict[str, Any] = self.__dict__.get("_gtp_leaves", {})
        leader = leaves.get(members[0])
        if leader is not None and len(leader.group) == self.num_gemms > 1:
            return materialize_leaves(leader.group)
        return torch.stack([getattr(self, name) for name in members])

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, single_grouped_weight={self.single_grouped_weight}"
        )
