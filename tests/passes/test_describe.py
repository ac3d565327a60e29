"""What is said of each weight group: kind, dtypes hop by hop, bytes on the wire; and the check against the rule."""

from dataclasses import replace

import pytest
import sympy
import torch
from tiny_models import BF16, IN, OUT, WORLD, capture, joint, run

from gtp_compile.passes.base import NOTE
from gtp_compile.passes.collective_ops import REPLICATED, Layout
from gtp_compile.passes.describe import GroupInfo, check_dtypes, describe_groups, describe_wire, wire_bytes
from gtp_compile.passes.insert_collectives import AccumulateNote

F32 = torch.float32
BEFORE = ("group_wgrads", "retype_wgrads", "fuse_wgrads")


def described(name: str, *, without: tuple[str, ...] = (), **kwargs) -> tuple[torch.fx.Graph, list[GroupInfo]]:
    """The lowered graph of a model, and what was found in it."""
    graph = capture(name, **kwargs) if kwargs else joint(name)
    run(graph, *(p for p in BEFORE if p not in without))
    groups = describe_groups(graph.module.graph)
    run(graph, "insert_collectives")
    return graph.module.graph, describe_wire(graph.module.graph, groups)


def info(**changes) -> GroupInfo:
    """A group whose every hop is in float32."""
    base = GroupInfo(
        (1,), Layout(("0",), (WORLD,), 0, OUT, "avg"), "gemm", "mm", "", F32, F32, F32, F32, F32, F32, (OUT, IN), 2
    )
    return replace(base, **changes)


# Kinds and dtypes.


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dense", ["gemm"]),
        ("experts", ["gemm"]),
        ("leader_only", ["gemm"]),
        ("thrice", ["gemm"]),
        ("tied", ["gemm"]),
        ("dense_bias", ["reduction", "gemm"]),
        ("embedding", ["reduction"]),
        ("layer_norm", ["reduction", "reduction"]),
        ("expert_bias_select", ["reduction"]),
        ("batched", ["gemm"]),
        ("scaled", ["gemm"]),
    ],
)
def test_kinds(name, kinds):
    _, groups = described(name)
    assert sorted(g.kind for g in groups) == sorted(kinds)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("dense_bias", ["mm", "reduce"]),
        ("experts", ["grouped_mm"]),
        ("grouped", ["gtp", "scatter"]),
        ("batched", ["bmm"]),
        ("picked", ["picked"]),
        ("broadcast", ["batch_sum"]),
        ("tied", ["mm + scatter"]),
        ("scaled", [""]),
    ],
)
def test_the_form_is_the_models_not_what_became_of_it(name, forms):
    _, groups = described(name)
    assert sorted(g.form for g in groups) == sorted(forms)
    _, groups = described(name, without=("retype_wgrads",))
    assert sorted(g.form for g in groups) == sorted(forms)


@pytest.mark.parametrize("name", ["dense_bias", "grouped", "embedding", "layer_norm", "tied", "checkpointed"])
def test_every_hop_has_the_rules_dtype(name):
    graph, groups = described(name)
    for g in groups:
        assert {g.gemm_dtype, g.scratch_dtype, g.wire_dtype, g.sum_dtype, g.main_grad_dtype, g.rule_dtype} == {F32}
        assert (g.matched, g.reason) == (True, "")
    check_dtypes(graph, groups, retyped=True)


def test_without_retype_the_fault_shows():
    graph, (group,) = described("experts", without=("retype_wgrads",))
    assert (group.gemm_dtype, group.scratch_dtype, group.wire_dtype, group.sum_dtype) == (BF16,) * 4
    assert (group.main_grad_dtype, group.rule_dtype) == (F32, F32)
    check_dtypes(graph, [group], retyped=False)
    with pytest.raises(RuntimeError, match=r"its scratch has torch.bfloat16, the rule asks for torch.float32"):
        check_dtypes(graph, [group], retyped=True)


def test_without_main_grad_the_compute_dtype_is_the_rule():
    graph, (group,) = described("experts", main_grad_dtype=None)
    assert (group.gemm_dtype, group.scratch_dtype, group.wire_dtype, group.rule_dtype) == (BF16,) * 4
    assert group.main_grad_dtype is None
    check_dtypes(graph, [group], retyped=True)


def test_one_rank_has_no_wire():
    graph, (group,) = described("dense", world=1)
    assert (group.wire_dtype, group.sum_dtype) == (None, None)
    check_dtypes(graph, [group], retyped=True)


def test_an_unmatched_gradient_keeps_its_reason_behind_retype():
    graph, (group,) = described("scaled")
    assert not group.matched
    assert "aten.mul.Tensor" in group.reason
    assert "mul_1" in group.reason
    assert (group.gemm_dtype, group.scratch_dtype, group.wire_dtype) == (None, F32, F32)
    check_dtypes(graph, [group], retyped=True)  # reported, no fault


def test_inputs_and_shape_of_a_group_of_several():
    _, groups = described("grouped")
    weights = next(g for g in groups if g.kind == "gemm")
    assert weights.inputs == tuple(sorted(weights.inputs))
    assert weights.full_shape == (3, OUT, IN)
    assert weights.layout.dim == 0  # of each member


def test_nothing_is_sent_for_a_frozen_member():
    graph, (group,) = described("frozen_member")
    assert len(group.inputs) == 3  # the group is named whole
    (scatter,) = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default)
    sent = scatter.args[0].meta["val"]
    assert wire_bytes(group)[1] == sent.nbytes * (WORLD - 1) // WORLD


def test_a_frozen_leader_still_sets_the_dtype():
    graph, (group,) = described("frozen_leader")
    assert (group.main_grad_dtype, group.rule_dtype, group.wire_dtype) == (F32, F32, F32)
    check_dtypes(graph, [group], retyped=True)


# The check against the rule.


@pytest.mark.parametrize("hop", ["gemm", "scratch", "wire", "sum"])
def test_a_lower_hop_raises_and_is_named(hop):
    group = info(**{f"{hop}_dtype": BF16})
    with pytest.raises(RuntimeError, match=rf"inputs \(1,\): its {hop} has torch.bfloat16, the rule asks for"):
        check_dtypes(torch.fx.Graph(), [group], retyped=True)
    check_dtypes(torch.fx.Graph(), [group], retyped=False)


def test_a_higher_hop_is_fine():
    wide = info(gemm_dtype=F32, scratch_dtype=F32, rule_dtype=BF16)
    check_dtypes(torch.fx.Graph(), [wide], retyped=True)


def test_an_unmatched_gemm_may_be_lower_but_nothing_behind_it():
    check_dtypes(torch.fx.Graph(), [info(gemm_dtype=BF16, reason="bmm")], retyped=True)
    with pytest.raises(RuntimeError, match="its wire"):
        check_dtypes(torch.fx.Graph(), [info(wire_dtype=BF16, reason="bmm")], retyped=True)


@pytest.mark.parametrize("retyped", [True, False])
def test_a_sum_narrower_than_its_main_grad_raises(retyped):
    graph, groups = described("dense")
    (total,) = (n for n in graph.nodes if isinstance(n.meta.get(NOTE), AccumulateNote))
    total.meta["val"] = total.meta["val"].to(BF16)
    with pytest.raises(RuntimeError, match=r"sums in torch.bfloat16 for a main_grad of torch.float32"):
        check_dtypes(graph, groups, retyped=retyped)


# Bytes.


@pytest.mark.parametrize(
    ("shape", "member_ndim", "dim", "bytes_", "formula"),
    [
        ((OUT, IN), 2, 0, 4 * OUT * IN * 3 // 4, "4*K*(N + Mod(-N, W))*(W - 1)/W"),
        ((3, OUT, IN), 3, 1, 4 * 3 * OUT * IN * 3 // 4, "4*E*K*(N + Mod(-N, W))*(W - 1)/W"),
        ((OUT,), 1, REPLICATED, 2 * 4 * OUT * 3 // 4, "8*N*(R - 1)/R"),  # an all-reduce sends twice
        ((2, 3, OUT, IN), 3, 1, 4 * 2 * 3 * OUT * IN * 3 // 4, "4*d0*d1*d3*(d2 + Mod(-d2, W))*(W - 1)/W"),
    ],
    ids=["dense", "stacked", "replicated", "four_dims"],
)
def test_bytes_on_the_wire(shape, member_ndim, dim, bytes_, formula):
    size = 0 if dim == REPLICATED else shape[dim - member_ndim]
    got, value = wire_bytes(
        info(full_shape=shape, member_ndim=member_ndim, layout=Layout(("0",), (WORLD,), dim, size, "avg"))
    )
    assert value == bytes_
    assert sympy.simplify(got - sympy.sympify(formula, {s.name: s for s in got.free_symbols})) == 0


def test_a_narrow_wire_costs_half():
    assert wire_bytes(info(wire_dtype=BF16))[1] * 2 == wire_bytes(info())[1]


def test_the_formula_holds_for_every_size_of_group():
    formula, _ = wire_bytes(info())
    for size in (1, 2, 8, 64):
        _, value = wire_bytes(info(layout=Layout(("0",), (size,), 0, OUT, "avg")))
        symbols = {s: {"N": OUT, "K": IN, "W": size}[s.name] for s in formula.free_symbols}
        assert formula.subs(symbols) == value
