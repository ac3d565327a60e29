"""What no pass knows: `explain` names the operator, `strict` raises with the same reasons, and names the weight.

Something that has a say in a weight's gradient (a scale, a mask, a routing weight, a permutation) is never ignored:
either a pass computes with it, or the weight stands here.
"""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BF16, EXPERTS, IN, OUT, ROWS, ends_of, shard_all
from torch import Tensor, nn

import gtp_compile
from gtp_compile.testing import fake_mesh

OFFS = (7, 0, 12, 5)
DENSE, STACK = (OUT, IN), (EXPERTS, OUT, IN)


def experts(x: Tensor, weight: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=ends_of(*OFFS))


UNKNOWN = {
    "weight_times_a_tensor": (DENSE, lambda x, w: F.linear(x, w * x.amax()), "aten.mul.Tensor"),
    "weight_over_a_tensor": (DENSE, lambda x, w: F.linear(x, w / x.amax()), "aten.div.Tensor"),
    "normalized_weight": (DENSE, lambda x, w: F.linear(x, F.normalize(w, dim=-1)), "aten.div.Tensor"),
    "masked_weight": (DENSE, lambda x, w: F.linear(x, w.masked_fill(w > 0, 0.0)), "aten.where.self"),
    "clamped_experts": (STACK, lambda x, w: experts(x, w.clamp(-0.1, 0.1)), "aten.where.self"),
    "dropped_experts": (STACK, lambda x, w: experts(x, F.dropout(w, 0.1)), "aten.mul.Tensor"),
    "scaled_experts": (STACK, lambda x, w: experts(x, w * x[:EXPERTS, :1, None]), "aten.mul.Tensor"),
    "rolled_experts": (STACK, lambda x, w: experts(x, w.roll(1, 0)), "aten.index.Tensor"),
    "cumulated_experts": (STACK, lambda x, w: experts(x, w.cumsum(0)), "prims.rev.default"),
    "bilinear": ((OUT, IN, IN), lambda x, w: F.bilinear(x, x, w), "aten._trilinear.default"),
    "convolution": ((OUT, IN, 1), lambda x, w: F.conv1d(x.t()[None], w), "aten.convolution_backward.default"),
}


class Model(nn.Module):
    def __init__(self, shape: tuple[int, ...], compute) -> None:
        super().__init__()
        self.known = nn.Linear(IN, IN, bias=False)
        self.proj = nn.Parameter(torch.randn(shape) * 0.3)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.known(x), self.proj)


@pytest.mark.parametrize("case", UNKNOWN)
def test_explain_and_strict_give_the_same_reason(case):
    shape, compute, operator = UNKNOWN[case]
    with fake_mesh(4) as mesh:
        model = gtp_compile.shard(Model(shape, compute), mesh, param_dtype=BF16, shard_fn=shard_all)
        x = torch.randn(ROWS, IN).to(BF16)
        row, known = gtp_compile.explain(model, options={"inner": "eager"})(x).groups
        assert known.matched
        assert (row.leader, row.matched, row.gemm_dtype) == ("proj", False, None)
        assert f"({operator}) is no known form of a weight gradient; it arrives rounded to {BF16}" in row.reason
        with pytest.raises(Exception, match="strict: weight gradients that would be summed") as raised:
            torch.compile(model, backend="gtp", options={"inner": "eager", "strict": True})(x)
        assert f"proj: {row.reason}" in str(raised.value)
        assert "known" not in str(raised.value).partition("strict: ")[2].partition(row.reason)[0]
