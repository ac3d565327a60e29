"""The finder: from the gradient at an anchor back to what computed it. If one of these fails, fix the finder."""

import pytest
import torch
from tiny_models import BF16, IN, OUT, WORLD, behind, hand_written, joint, wgrad_graph
from wgrad_forms import FORMS, Form, form_id, mm, operands

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.gemm_forms import is_grouped_wgrad_mm, is_outer_product, transposed
from gtp_compile.passes.wgrad_patterns import find_chain, kind_of

aten = torch.ops.aten
gtp = torch.ops.gtp
prims = torch.ops.prims
F32 = torch.float32


def chain_of(graph, dtype=F32):
    (anchor,) = Finalize.find(graph.module.graph)
    return find_chain(anchor.grad, dtype)


def root(fn, *inputs):
    """The node that a hand-written function returns."""
    graph = hand_written(lambda *args: [fn(*args)], *inputs)
    return graph.module.graph.output_node().args[0][0]


# What is followed.


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_every_form_is_followed_to_its_operands(form: Form):
    graph = wgrad_graph(form.compute, *operands())
    text = graph.text()
    chain = chain_of(graph)
    assert (len(chain.gemms), len(chain.reductions), chain.reason) == (form.gemms, form.reductions, "")
    assert chain.nodes[-1] is chain.root
    assert graph.text() == text  # pure


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_a_chain_lists_inputs_before_users_and_nothing_twice(form: Form):
    chain = chain_of(wgrad_graph(form.compute, *operands()))
    position = {n: i for i, n in enumerate(chain.nodes)}
    assert len(position) == len(chain.nodes)
    assert len(set(chain.operands)) == len(chain.operands)
    for node in chain.nodes:
        assert all(position[a] < position[node] for a in node.all_input_nodes if a in position)
        inside = chain.gemms[node].inside if node in chain.gemms else []
        assert all(
            a in position or a in inside or a in chain.operands for n in (*inside, node) for a in n.all_input_nodes
        )


def test_the_operands_of_a_gemm_end_the_chain():
    graph = joint("dense")
    chain = chain_of(graph)
    assert [n.target for n in chain.nodes] == [aten.mm.default]
    assert [n.target for n in chain.operands] == [aten.permute.default, "primals_1"]


def test_our_own_gemms_are_gemms_in_any_dtype():
    chain = chain_of(behind("experts", "retype_wgrads"))
    assert [n.target for n in chain.gemms] == [gtp.grouped_wgrad.default]
    chain = chain_of(joint("grouped_stacked"))  # written by our own op's backward, in bf16
    assert [(n.target, n.meta["val"].dtype) for n in chain.gemms] == [(gtp.grouped_wgrad.default, BF16)]


def test_a_gemm_that_reaches_an_anchor_twice_is_found_once():
    def doubled(dy, x):
        once = mm(dy, x)
        return aten.add.Tensor(once, once)

    dy, x, *_ = operands()
    assert len(chain_of(wgrad_graph(doubled, dy, x)).gemms) == 1


def test_a_very_long_sum_of_uses_is_followed():
    def many_uses(dy, x):
        total = mm(dy, x)
        for _ in range(200):
            total = aten.add.Tensor(total, mm(dy, x))
        return total

    dy, x, *_ = operands()
    assert len(chain_of(wgrad_graph(many_uses, dy, x)).gemms) == 201


def one_row(dy, x):
    """Experts of one row each: what a bias [E, N] is given is dy [E, 1, N] itself."""
    return aten.squeeze.dim(dy, 1), aten.bmm.default(aten.permute.default(dy, [0, 2, 1]), x)


def test_one_rows_gradient_is_a_biass_where_a_wgrad_gemm_reads_it_too():
    dy, x = torch.ones(3, 1, OUT, dtype=BF16), torch.ones(3, 1, IN, dtype=BF16)
    both = root(lambda dy, x: one_row(dy, x)[0] + one_row(dy, x)[1].sum(-1), dy, x)
    chain = find_chain(both.args[0], F32)
    assert ([n.name for n in chain.rows], chain.reason) == (["arg0_1"], "")
    alone = find_chain(root(lambda dy: aten.squeeze.dim(dy, 1), dy), F32)
    assert alone.rows == []
    assert alone.reason == "the gradient comes from outside this graph (arg0_1); its GEMM is in another graph"


def test_several_rows_that_a_gemm_reads_are_no_weights_gradient():
    dy, x = torch.ones(3, 2, OUT, dtype=BF16), torch.ones(3, 2, IN, dtype=BF16)
    both = root(lambda dy, x: aten.permute.default(dy, [0, 2, 1]) @ x + dy.sum(), dy, x)
    (read,) = [n for n in both.graph.find_nodes(op="placeholder") if n.name == "arg0_1"]
    assert find_chain(read, F32).rows == []


# What is not, and the reason.


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda dy, x: dy, "the gradient comes from outside this graph (arg1_1); its GEMM is in another graph"),
        (lambda dy, x: aten.exp.default(mm(dy, x)), "exp: no pass knows a weight gradient through aten.exp.default"),
        (lambda dy, x: aten.mul.Tensor(mm(dy, x), mm(dy, x)), "mul: no pass knows a weight gradient through aten.mul"),
        (lambda dy, x: aten.add.Tensor(mm(dy, x), 1.0), "add: no pass knows a weight gradient through aten.add.Tensor"),
        (
            lambda dy, x: aten.add.Tensor(mm(dy, x), mm(dy, x), alpha=2),
            "add: no pass knows a weight gradient through aten.add.Tensor",
        ),
        (
            lambda dy, x: aten.cumsum.default(mm(dy, x), 0),
            "cumsum: no pass knows a weight gradient through aten.cumsum.default",
        ),
    ],
    ids=["outside", "exp", "times_a_tensor", "plus_a_number", "alpha", "cumsum"],
)
def test_the_reason_names_the_node_and_the_operator(compute, reason):
    dy, x, *_ = operands()
    chain = chain_of(wgrad_graph(compute, dy, x))
    assert chain.reason.startswith(reason)
    assert [s.node for s in chain.unknown.values()] == [n.name for n in chain.unknown]


def test_two_unknown_terms_give_both_reasons():
    dy, x, *_ = operands()
    compute = lambda dy, x: aten.add.Tensor(aten.exp.default(mm(dy, x)), aten.sin.default(mm(dy, x)))  # noqa: E731
    reason = chain_of(wgrad_graph(compute, dy, x)).reason
    assert reason.count("; ") == 1
    assert "aten.exp.default" in reason
    assert "aten.sin.default" in reason


def test_what_is_as_wide_as_the_sum_has_lost_nothing():
    dy, x, *_ = operands()
    graph = wgrad_graph(lambda dy, x: aten.exp.default(mm(dy.float(), x.float())), dy, x)
    assert chain_of(graph, F32).reason == ""
    assert "aten.exp.default" in chain_of(graph, torch.float64).reason
    graph = wgrad_graph(lambda dy, x: aten.exp.default(mm(dy, x)), dy, x)
    assert chain_of(graph, BF16).reason == ""


# The small predicates.


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda t: aten.mul.Tensor(t, 2.0), "scale"),
        (lambda t: aten.mul.Tensor(t, t), None),
        (lambda t: aten.div.Tensor(t, 2.0), "scale"),
        (lambda t: aten.neg.default(t), "scale"),
        (lambda t: aten.add.Tensor(t, t), "add"),
        (lambda t: aten.add.Tensor(t, t, alpha=2), None),
        (lambda t: aten.sub.Tensor(t, t), None),
        (lambda t: aten.permute.default(t, [1, 0]), "view"),
        (lambda t: aten.cat.default([t, t]), "list"),
        (lambda t: prims.convert_element_type.default(t, F32), "cast"),
        (lambda t: aten.sum.dim_IntList(t, [0]), "reduce"),
        (lambda t: aten.amax.default(t, [0]), None),
        (lambda t: aten.new_zeros.default(t, [3]), "factory"),
        (lambda t: aten.mm.default(t, aten.t.default(t)), "gemm"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_kinds(fn, kind):
    assert kind_of(root(fn, torch.randn(4, 6))) == kind


def test_an_input_has_no_kind():
    graph = hand_written(lambda t: [t], torch.randn(2))
    assert kind_of(graph.module.graph.find_nodes(op="placeholder")[0]) is None


@pytest.mark.parametrize(
    ("fn", "is_transpose"),
    [
        (lambda t: aten.t.default(t), True),
        (lambda t: aten.permute.default(t, [1, 0]), True),
        (lambda t: aten.transpose.int(t, 0, 1), True),
        (lambda t: aten.transpose.int(t, -1, -2), True),
        (lambda t: aten.permute.default(t, [0, 1]), False),
        (lambda t: aten.transpose.int(t, 1, 1), False),
        (lambda t: aten.view.default(t, [6, 4]), False),
        (lambda t: aten.transpose.int(aten.unsqueeze.default(t, 0), 1, 2), True),
        (lambda t: aten.transpose.int(aten.unsqueeze.default(t, 0), 0, 1), False),
    ],
    ids=[
        "t",
        "permute",
        "transpose",
        "negative_dims",
        "permute_nothing",
        "transpose_nothing",
        "view",
        "batched",
        "outer",
    ],
)
def test_transposed_finds_the_tensor_behind_a_transpose(fn, is_transpose):
    node = root(fn, torch.randn(4, 6))
    assert transposed(node) is (node.all_input_nodes[0] if is_transpose else None)


def test_only_a_contraction_over_ragged_rows_is_a_grouped_wgrad():
    dy, x, _, offs = operands()
    weight = torch.randn(4, OUT, IN).to(BF16)
    wgrad = root(lambda dy, x, offs: aten._grouped_mm.default(dy.t(), x, offs), dy, x, offs)
    dgrad = root(lambda dy, w, offs: aten._grouped_mm.default(dy, w, offs), dy, weight, offs)
    assert (is_grouped_wgrad_mm(wgrad), is_grouped_wgrad_mm(dgrad)) == (True, False)
    assert (kind_of(wgrad), kind_of(dgrad)) == ("gemm", None)


@pytest.mark.parametrize(
    ("a", "b", "is_wgrad"),
    [
        ((OUT, 1), (1, IN), True),
        ((OUT, 1), (OUT, IN), False),  # a column times a matrix
        ((OUT, IN), (OUT, IN), False),
        ((1, 1), (1, IN), False),  # a number times a row
        ((OUT, 1), (1, 1), False),
    ],
)
def test_the_wgrad_of_one_row_is_written_as_a_multiplication(a, b, is_wgrad):
    node = root(lambda a, b: aten.mul.Tensor(a, b), torch.randn(a), torch.randn(b))
    assert is_outer_product(node) is is_wgrad
    assert kind_of(node) == ("gemm" if is_wgrad else None)


def test_anchors_are_read_by_name():
    graph = joint("grouped")
    for anchor in Finalize.find(graph.module.graph):
        assert anchor.node.target is gtp.finalize.default
        assert len(anchor.shards) == len(anchor.main_grads) == 3
        assert (anchor.layout.group_sizes, anchor.layout.reduce_op) == ((WORLD,), "avg")
        assert anchor.layout.full_size == (OUT if anchor.layout.sharded else 0)
        assert anchor.grad_dtype is F32
