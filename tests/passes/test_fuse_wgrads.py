"""fuse_wgrads: what retype_wgrads left of torch's grouped GEMM becomes our kernel, in the same dtype."""

import pytest
import torch
from tiny_models import (
    BF16,
    IN,
    OUT,
    ROWS,
    anchor_errors,
    assert_unchanged_by,
    behind,
    capture,
    nodes,
    ops,
    relative_error,
    run,
    wgrad_graph,
)
from wgrad_forms import FUSED_FORMS, Form, form_id, operands

from gtp_compile.testing import compare_numerics

aten = torch.ops.aten
gtp = torch.ops.gtp


# Rewrites.


@pytest.mark.parametrize("name", ["experts", "experts_transposed", "leader_only_torch", "one_by_one"])
def test_torchs_grouped_gemm_becomes_ours(name):
    graph = behind(name, "group_wgrads")
    done = graph.run("fuse_wgrads")
    assert done.report.changed == 1
    assert done.ops == {"aten._grouped_mm.default": -1, "aten.permute.default": -1, "gtp.grouped_wgrad.default": 1}
    (gemm,) = nodes(graph, gtp.grouped_wgrad.default)
    assert gemm.meta["val"].dtype is gemm.args[3] is BF16


def test_compute_dtype_without_main_grad():
    graph = run(capture("experts", main_grad_dtype=None), "group_wgrads", "retype_wgrads")
    assert ops(graph)["gtp.grouped_wgrad.default"] == 0
    assert graph.run("fuse_wgrads").report.changed == 1


@pytest.mark.parametrize("form", FUSED_FORMS, ids=form_id)
def test_a_batch_that_is_summed_or_scattered_becomes_one_gemm_in_the_compute_dtype(form: Form):
    given = operands()
    graph = wgrad_graph(form.compute, *given)
    before = graph.copy()
    assert graph.run("fuse_wgrads").report.changed == 1
    counts = ops(graph)
    assert counts["gtp.dense_wgrad.default"] + counts["gtp.grouped_wgrad.default"] == 1
    assert not {"aten.bmm.default", "aten.index_add.default", "aten.sum.dim_IntList"} & set(counts)
    shapes = {tuple(getattr(n.meta["val"], "shape", ())) for n in graph.module.graph.nodes if "val" in n.meta}
    assert shapes.isdisjoint({(ROWS, OUT, IN), (ROWS, IN, OUT)})  # no matrix for each row
    assert compare_numerics(before, graph)[0] <= 1e-2  # before, every term was rounded
    (got,) = graph.evaluate()
    want = form.reference(*given)
    assert relative_error(got, want.narrow(0, 0, got.shape[0])) <= 3e-3  # now the sum is, once
    assert_unchanged_by(graph, "fuse_wgrads")


# Refuses: it looks only at what reaches a gradient anchor.


def test_the_users_own_grouped_gemms_stay():
    graph = behind("experts", "fuse_wgrads")
    (forward,) = nodes(graph, aten._grouped_mm.default)
    assert forward.args[1].meta["val"].ndim == 3


@pytest.mark.parametrize("name", ["dense", "grouped_stacked", "embedding", "batched", "scaled"])
def test_other_gradients_are_none_of_its_business(name):
    graph = behind(name, "group_wgrads")
    before = graph.text()
    done = graph.run("fuse_wgrads")
    assert (done.report.changed, done.report.skipped) == (0, [])
    assert graph.text() == before


# Preserves.


@pytest.mark.parametrize("name", ["experts", "experts_transposed"])
def test_the_sum_over_rows_is_rounded_as_before(name):
    before = behind(name, "group_wgrads")
    after = run(before.copy(), "fuse_wgrads")
    differences = [d for d in compare_numerics(before, after) if d is not None]
    assert differences[0] == 0.0
    # Same products, summed in float32 in another order, then rounded once to bf16.
    assert differences[1] <= 1e-3
    assert 0 < max(anchor_errors(after)) <= 1.01 * max(anchor_errors(before))


def test_nothing_is_left_to_it_behind_retype():
    graph = behind("experts", "group_wgrads", "retype_wgrads")
    before = graph.copy()
    done = graph.run("fuse_wgrads")
    assert (done.report.matched, done.report.changed) == (1, 0)
    assert {d for d in compare_numerics(before, graph) if d is not None} == {0.0}


def test_an_expert_without_rows_gets_exact_zeros_and_the_tail_is_not_read():
    dy, x, *_ = operands()
    dy[20:] = torch.nan
    offs = torch.tensor([7, 7, 20], dtype=torch.int32)
    got = gtp.grouped_wgrad(dy, x, offs, torch.float32)
    assert not got[1].any()
    assert relative_error(got[0], dy[:7].double().t() @ x[:7].double()) <= 1e-6
    assert got.isfinite().all()


# Idempotent.


@pytest.mark.parametrize("name", ["experts", "experts_transposed", "leader_only_torch"])
def test_a_second_run_changes_nothing(name):
    assert_unchanged_by(behind(name, "group_wgrads", "fuse_wgrads"), "fuse_wgrads")
