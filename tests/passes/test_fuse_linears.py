"""fuse_linears: grouped GEMMs over rows go to our kernel where it is faster."""

import copy
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from tiny_models import (
    BF16,
    EXPERTS,
    IN,
    OUT,
    ROWS,
    Experts,
    assert_unchanged_by,
    behind,
    ends_of,
    hand_written,
    listing,
    nodes,
    ops,
    run,
    shard_all,
    split,
)
from torch.utils.checkpoint import CheckpointPolicy

import gtp_compile
from gtp_compile.kernels.grouped_linear import choice
from gtp_compile.passes import fuse_linears as fuse_linears_pass
from gtp_compile.passes.base import PassContext
from gtp_compile.testing import JointGraph, compare_numerics, fake_mesh

aten = torch.ops.aten
gtp = torch.ops.gtp
OURS = "gtp.grouped_linear.default"
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads", "fuse_dgrads", "insert_collectives", "fuse_gathers")


@pytest.fixture
def ours_is_faster(monkeypatch):
    monkeypatch.setattr(sys.modules["gtp_compile.passes.fuse_linears"], "outruns_torch", lambda *_: True)


def rows_graph(is_transposed: bool, device: str = "cpu", out: int = OUT, features: int = IN) -> JointGraph:
    g = torch.Generator().manual_seed(0)
    shape = (EXPERTS, out, features) if is_transposed else (EXPERTS, features, out)
    x, weight = (torch.randn(s, generator=g).to(device, BF16) for s in ((ROWS, features), shape))

    def step(x, weight, offs):
        return [aten._grouped_mm.default(x, aten.transpose.int(weight, 1, 2) if is_transposed else weight, offs)]

    return hand_written(step, x, weight, ends_of(7, 0, 12, 5).to(device))


# Rewrites.


@pytest.mark.usefixtures("ours_is_faster")
def test_the_rewrite():
    graph = rows_graph(is_transposed=True)
    done = graph.run("fuse_linears")
    assert (done.report.matched, done.report.changed, done.report.skipped) == (1, 1, [])
    assert_expected_inline(
        listing(graph.module.graph.nodes),
        """grouped_linear_default: bf16[24, 16] = gtp.grouped_linear(x_1, weight_1, offs_1)""",
    )


@pytest.mark.usefixtures("ours_is_faster")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_numbers_stay(is_transposed):
    before = rows_graph(is_transposed)
    after = before.copy()
    assert after.run("fuse_linears").report.changed == 1
    assert (ops(after)[OURS], ops(after)["aten._grouped_mm.default"]) == (1, 0)
    assert compare_numerics(before, after) == [0.0]


@pytest.mark.usefixtures("ours_is_faster")
def test_forward_and_backward_of_a_model_on_one_rank():
    """Where nothing is gathered, so that `fuse_gathers` finds nothing."""
    graph = run(behind("experts", *BEFORE, world=1), "fuse_linears", "recompute_gathers")
    forward, backward, _ = split(graph)
    assert nodes(forward.graph, gtp.grouped_linear.default)
    assert not nodes(forward.graph, aten._grouped_mm.default) + nodes(backward.graph, aten._grouped_mm.default)


@pytest.mark.usefixtures("ours_is_faster")
def test_a_compiled_step():
    """On one rank, beside the model in eager: both round to bf16."""
    torch.manual_seed(0)
    model = Experts()
    twin = copy.deepcopy(model).to(BF16)
    with fake_mesh(1) as mesh:
        gtp_compile.shard(model, mesh, shard_fn=shard_all, param_dtype=BF16)
        offs, x = ends_of(7, 0, 12, 5), torch.randn(ROWS, IN).to(BF16)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [torch.compile(model, backend="gtp", options={"inner": "eager"})(xs[0], offs), twin(xs[1], offs)]
        for y in outputs:
            y.backward(torch.ones_like(y))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(xs[0].grad, xs[1].grad)
    torch.testing.assert_close(model.proj.main_grad, twin.proj.grad.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("ours_is_faster")
def test_a_checkpoint_keeps_its_tags():
    graph = rows_graph(is_transposed=False)
    (gemm,) = nodes(graph, aten._grouped_mm.default)
    gemm.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 3}
    graph.run("fuse_linears")
    (ours,) = nodes(graph, gtp.grouped_linear.default)
    for node in (ours, ours.args[1]):
        assert (node.meta["recompute"], node.meta["ac_graph_id"]) == (CheckpointPolicy.PREFER_RECOMPUTE, 3)


# Refuses.


def test_torch_keeps_what_it_does_as_well():
    graph = rows_graph(is_transposed=True)
    before = graph.text()
    report = graph.run("fuse_linears").report  # on CPU
    assert (report.matched, report.changed, report.skipped) == (1, 0, [])
    assert graph.text() == before


@pytest.mark.usefixtures("ours_is_faster")
def test_a_weight_gradient_is_no_gemm_over_rows():
    def step(dy, x, offs):
        return [aten._grouped_mm.default(aten.t.default(dy), x, offs)]

    graph = hand_written(step, *(torch.randn(ROWS, n).to(BF16) for n in (OUT, IN)), ends_of(7, 0, 12, 5))
    assert graph.run("fuse_linears").report.matched == 0


@pytest.mark.usefixtures("ours_is_faster")
@pytest.mark.parametrize("operand", [{"bias": True}, {"out_dtype": torch.float32}])
def test_an_operand_more_is_not_ignored(operand):
    graph = rows_graph(is_transposed=True)
    (gemm,) = nodes(graph, aten._grouped_mm.default)
    gemm.kwargs = {key: gemm.args[0] if value is True else value for key, value in operand.items()}
    assert fuse_linears_pass(graph.module, PassContext("joint")).matched == 0


@pytest.mark.parametrize(
    ("out", "features", "dtype", "capability", "gluon", "faster"),
    [
        (1536, 2048, torch.bfloat16, (9, 0), True, True),  # Qwen3-30B-A3B
        (4096, 7168, torch.bfloat16, (9, 0), True, False),  # DeepSeek-V3
        (1536, 2048, torch.bfloat16, (9, 0), False, False),
        (1540, 2048, torch.bfloat16, (9, 0), True, False),  # not for TMA
        (1536, 2048, torch.float32, (9, 0), True, False),  # not measured
        (4096, 7168, torch.float16, (9, 0), True, True),  # torch has no kernel for it
        (4096, 7168, torch.bfloat16, (8, 0), False, True),  # torch waits for the counts
        (1536, 2048, torch.bfloat16, (10, 0), False, False),
    ],
)
def test_where_ours_is_faster(monkeypatch, out, features, dtype, capability, gluon, faster):
    monkeypatch.setattr(choice, "has_gluon", lambda: gluon)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(ROWS, features, dtype=dtype, device="cuda")
        weight = torch.empty(EXPERTS, out, features, dtype=dtype, device="cuda")
        assert choice.outruns_torch(x, weight) is faster


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_numbers_stay_on_a_gpu(is_transposed):
    before = rows_graph(is_transposed, "cuda", out=512, features=256)
    after = before.copy()
    assert after.run("fuse_linears").report.changed == 1
    (difference,) = compare_numerics(before, after)
    assert difference <= 5e-3  # both round to bf16


# Idempotent.


@pytest.mark.usefixtures("ours_is_faster")
def test_a_second_run_changes_nothing():
    assert_unchanged_by(run(behind("experts", *BEFORE, world=1), "fuse_linears"), "fuse_linears")
