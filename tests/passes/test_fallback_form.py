"""Hugging Face's own grouped GEMM (in every dtype but bf16): its weight gradient is found, and written in float32."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import gtp_compile
from gtp_compile.testing import JointGraph, capture_joint, fake_mesh

pytest.importorskip("transformers.integrations.moe")

E, K, N, ROWS = 3, 6, 8, 12


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, K, N))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs)


def captured(offs_dtype: torch.dtype) -> tuple[JointGraph, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, K).half().requires_grad_()
    offs = torch.tensor([5, 5, ROWS], dtype=offs_dtype)
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(
            Experts(), mesh, shard_fn=lambda *_: Shard(2), param_dtype=torch.float16, src_data_rank=None
        )
        return capture_joint(model, x, offs), x, offs


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
def test_it_becomes_a_grouped_wgrad_in_float32(offs_dtype):
    joint, *_ = captured(offs_dtype)
    joint.run("group_wgrads")
    run = joint.run("retype_wgrads")
    assert not run.report.skipped
    assert run.ops["gtp.grouped_wgrad.default"] == 1
    assert "gtp.widen.default" not in run.ops
    (gemm,) = joint.module.graph.find_nodes(op="call_function", target=torch.ops.gtp.grouped_wgrad.default)
    assert gemm.meta["val"].dtype == torch.float32
    assert tuple(gemm.meta["val"].shape) == (E, K, N)


def test_explain_names_it():
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(
            Experts(), mesh, shard_fn=lambda *_: Shard(2), param_dtype=torch.float16, src_data_rank=None
        )
        offs = torch.tensor([5, 5, ROWS], dtype=torch.int32)
        (row,) = gtp_compile.explain(model, options={"inner": "eager"})(torch.randn(ROWS, K).half(), offs).groups
    assert (row.matched, row.form, row.gemm_dtype) == (True, "fallback", "float32")
