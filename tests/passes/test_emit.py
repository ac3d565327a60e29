"""One computation, two uses: inserted into a graph, or run at once. And what the collectives' layouts mean."""

import pytest
import torch
from tiny_models import hand_written, joint, nodes

from gtp_compile.checks import check_graph, check_metadata
from gtp_compile.passes.collective_ops import (
    REPLICATED,
    DryEmit,
    Layout,
    emit_cast,
    emit_gather,
    emit_reduce,
    emit_stack,
)  # fmt: skip
from gtp_compile.passes.emit import GraphEmit, RunEmit, insert_call, values

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
BF16 = torch.bfloat16
WORLD = 4

LAYOUTS = [
    pytest.param((16, 3), 0, 1, id="dim0"),
    pytest.param((3, 16), 1, 1, id="dim1"),
    pytest.param((2, 16, 3), 1, 1, id="stack_dim1"),
    pytest.param((2, 3, 16), 2, 1, id="stack_dim2"),
    pytest.param((16, 3), 0, 3, id="three_members_dim0"),
    pytest.param((3, 16), 1, 3, id="three_members_dim1"),
    pytest.param((13, 3), 0, 1, id="uneven"),  # 4, 4, 4 and 1 rows
    pytest.param((5, 3), 0, 1, id="an_empty_part"),  # 2, 2, 1 and 0 rows
    pytest.param((1, 3), 0, 1, id="one_row"),
    pytest.param((3, 6), 1, 1, id="uneven_dim1"),
    pytest.param((2, 13, 3), 1, 1, id="uneven_stack"),
    pytest.param((2, 3, 1), 2, 1, id="one_column_of_a_stack"),
    pytest.param((5, 3), 0, 3, id="three_uneven_members"),
    pytest.param((3, 5), 1, 3, id="three_uneven_members_dim1"),
    pytest.param((5,), REPLICATED, 1, id="replicated"),
    pytest.param((5,), REPLICATED, 3, id="three_members_replicated"),
]


def layout_of(shape: tuple[int, ...], dim: int, size: int = WORLD) -> Layout:
    """For a weight of this (full) shape."""
    return Layout(("0",), (size,), dim, 0 if dim == REPLICATED else shape[dim], "avg")


def parts(full: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """What each rank holds."""
    return [layout_of(full.shape, dim).part(full, rank).contiguous() for rank in range(WORLD)]


class Recording(DryEmit):
    """Keeps what this rank gives to its one collective."""

    sent: torch.Tensor

    def __call__(self, target, *args, **kwargs):
        if getattr(target, "namespace", "") == "_c10d_functional" and target is not c10d.wait_tensor.default:
            assert args[0].is_contiguous()
            self.sent = args[0]
        return super().__call__(target, *args, **kwargs)


class Together(RunEmit):
    """One rank, whose one collective gets what all ranks sent."""

    def __init__(self, sent: list[torch.Tensor], rank: int) -> None:
        self.sent, self.rank = sent, rank

    def __call__(self, target, *args, **kwargs):
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat(self.sent)
        if target is c10d.all_reduce.default:
            return torch.stack(self.sent).mean(0)
        if target is c10d.reduce_scatter_tensor.default:
            return torch.stack(self.sent).mean(0).chunk(WORLD)[self.rank]
        return args[0] if target is c10d.wait_tensor.default else target(*args, **kwargs)


def on_every_rank(compute) -> list:
    """`compute(emit, rank)` on each rank, with collectives that work."""
    sent = []
    for rank in range(WORLD):
        recording = Recording()
        compute(recording, rank)
        sent.append(getattr(recording, "sent", None))
    return [compute(Together(sent, rank), rank) for rank in range(WORLD)]


# What the layouts mean.


@pytest.mark.parametrize(("shape", "dim", "members"), LAYOUTS)
def test_a_gather_gives_every_rank_the_whole_weight(shape, dim, members):
    full = [torch.randn(shape).to(BF16).float() for _ in range(members)]
    layout = layout_of(shape, dim)
    results = on_every_rank(lambda emit, r: emit_gather(emit, [parts(f, dim)[r] for f in full], layout, BF16))
    want = full[0] if members == 1 else torch.stack(full)
    for got in results:
        assert got.dtype == BF16
        assert torch.equal(got.float(), want) and got.is_contiguous()


@pytest.mark.parametrize(("shape", "dim", "members"), LAYOUTS)
def test_a_reduction_gives_every_rank_its_part_of_the_mean(shape, dim, members):
    grads = [torch.randint(-8, 8, shape if members == 1 else (members, *shape)).float() * 4 for _ in range(WORLD)]
    mean = torch.stack(grads).mean(0)
    layout = layout_of(shape, dim)
    shards = [[parts(torch.zeros(shape), dim)[r]] * members for r in range(WORLD)]
    results = on_every_rank(lambda emit, r: emit_reduce(emit, grads[r], shards[r], layout, torch.float32))
    for rank, got in enumerate(results):
        want = [mean] if members == 1 else mean.unbind(0)
        assert len(got) == members
        assert all(torch.equal(g, parts(w, dim)[rank]) for g, w in zip(got, want, strict=True))


def test_strided_gradients_are_made_contiguous_for_the_wire():
    grad = torch.randn(3, 16).t()  # [16, 3]
    shard, layout = torch.zeros(4, 3), layout_of((16, 3), 0)
    results = on_every_rank(lambda emit, r: emit_reduce(emit, grad, [shard], layout, torch.float32))
    assert torch.equal(torch.cat([r for (r,) in results]), grad)


def test_a_narrow_gradient_is_cast_before_it_travels():
    sent = Recording()
    emit_reduce(sent, torch.randn(16, 3).to(BF16), [torch.zeros(4, 3)], layout_of((16, 3), 0), torch.float32)
    assert sent.sent.dtype == torch.float32


def test_a_wide_shard_is_cast_before_it_travels():
    sent = Recording()
    emit_gather(sent, [torch.randn(4, 3)], layout_of((16, 3), 0), BF16)
    assert sent.sent.dtype == BF16


@pytest.mark.parametrize("dim", [0, REPLICATED])
def test_one_rank_sends_nothing(dim):
    sent = Recording()
    full = torch.randn(16, 3)
    layout = layout_of((16, 3), dim, 1)
    assert torch.equal(emit_gather(sent, [full], layout, torch.float32), full)
    (got,) = emit_reduce(sent, full, [full], layout, torch.float32)
    assert torch.equal(got, full)
    assert not hasattr(sent, "sent")


@pytest.mark.parametrize("rows", [0, 16])
def test_an_empty_gradient_travels_like_any_other(rows):
    """Every rank issues the same collectives, whatever its sizes."""
    grad = torch.zeros(16, rows)
    (got,) = emit_reduce(Recording(), grad, [torch.zeros(4, rows)], layout_of((16, rows), 0), torch.float32)
    assert got.shape == (4, rows)


def test_padding_travels_as_zeros_and_stays_behind():
    sent = Recording()
    emit_gather(sent, [torch.ones(1, 3)], layout_of((13, 3), 0), torch.float32)  # the last rank's row
    assert torch.equal(sent.sent, torch.cat([torch.ones(1, 3), torch.zeros(3, 3)]))
    emit_reduce(sent, torch.ones(13, 3), [torch.ones(1, 3)], layout_of((13, 3), 0), torch.float32)
    assert torch.equal(sent.sent, torch.cat([torch.ones(13, 3), torch.zeros(3, 3)]))


@pytest.mark.parametrize("dim", [0, REPLICATED])
def test_replicas_sum_the_shard_behind_the_scatter_one_mesh_dim_after_the_other(dim):
    class Order(DryEmit):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, str, tuple[int, ...]]] = []

        def __call__(self, target, *args, **kwargs):
            if getattr(target, "namespace", "") == "_c10d_functional" and target is not c10d.wait_tensor.default:
                self.calls.append((target._opname, args[-1], tuple(args[0].shape)))
            return super().__call__(target, *args, **kwargs)

    emit = Order()
    layout = Layout(("shards", "rows", "one", "columns"), (4, 2, 1, 3), dim, 13 if dim == 0 else 0, "sum")
    shard = torch.zeros(1, 3) if dim == 0 else torch.zeros(13, 3)
    (got,) = emit_reduce(emit, torch.ones(13, 3), [shard], layout, torch.float32)
    assert got.shape == shard.shape
    scatter = [("reduce_scatter_tensor", "shards", (16, 3))] if dim == 0 else [("all_reduce", "shards", (13, 3))]
    rest = [("all_reduce", name, tuple(shard.shape)) for name in ("rows", "columns")]  # nobody to meet in "one"
    assert emit.calls == scatter + rest
    assert layout.ranks == 24 and layout.shards == (4 if dim == 0 else 1)


def test_parts_are_those_of_torch_chunk():
    """And so of DTensor: ceil(size / ranks) rows each, until there are none left."""
    for size in range(1, 20):
        full = torch.arange(size)
        chunks = [*full.chunk(WORLD), *[full[:0]] * WORLD][:WORLD]
        layout = layout_of((size,), 0)
        assert all(torch.equal(layout.part(full, r), chunks[r]) for r in range(WORLD))


# Graph and eager.


@pytest.mark.parametrize(("shape", "dim", "members"), LAYOUTS)
def test_the_graph_computes_what_the_calls_compute(shape, dim, members):
    layout = layout_of(shape, dim)
    full = [torch.randn(shape) for _ in range(members)]
    shards = [parts(f, dim)[0] for f in full]
    grad = torch.randn(shape) if members == 1 else torch.randn(members, *shape)
    graph = hand_written(lambda grad, *shards: [grad, *shards], grad, *shards)
    fx_graph = graph.module.graph
    output = fx_graph.output_node()
    grad_node, *shard_nodes = output.args[0]
    emit = GraphEmit(fx_graph, grad_node)
    with emit.before(output):
        gathered = emit_gather(emit, shard_nodes, layout, BF16)
        reduced = emit_reduce(emit, grad_node, shard_nodes, layout, torch.float32)
    output.args = ([gathered, *reduced],)
    graph.module.recompile()
    check_graph(graph.module)
    check_metadata(graph.module)
    dry = DryEmit()
    want = [emit_gather(dry, shards, layout, BF16), *emit_reduce(dry, grad, shards, layout, torch.float32)]
    got = graph.evaluate()
    assert all(torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(got, want, strict=True))
    assert [n.target for n in emit.nodes if n in fx_graph.nodes] == [n.target for n in emit.nodes]


def test_nothing_is_emitted_for_what_is_there_already():
    x = torch.randn(4)
    emit = RunEmit()
    assert emit_cast(emit, x, torch.float32) is x
    assert emit_stack(emit, [x]) is x
    assert emit.value(x) is x


# insert_call.


def test_a_new_node_has_true_metadata_and_its_neighbours_provenance():
    graph = joint("dense")
    (like,) = nodes(graph, aten.mm.default)[1:]
    like.meta["seq_nr"] = 17
    with graph.module.graph.inserting_after(like):
        node = insert_call(graph.module.graph, aten.add.Tensor, (like, like), {"alpha": 2}, like=like)
    assert node.meta["val"].shape == like.meta["val"].shape
    assert node.meta["val"].dtype == BF16
    assert node.meta["val"] is not like.meta["val"]
    for key in ("partitioner_tag", "seq_nr", "stack_trace"):
        assert node.meta.get(key) == like.meta.get(key)
    assert node.meta["partitioner_tag"] == "is_backward"


def test_arguments_may_hold_nodes_in_lists():
    graph = joint("dense")
    (like,) = nodes(graph, aten.mm.default)[1:]
    with graph.module.graph.inserting_after(like):
        node = insert_call(graph.module.graph, aten.cat.default, ([like, like], 0), like=like)
    assert node.meta["val"].shape[0] == 2 * like.meta["val"].shape[0]
    assert values([like, 3, None])[0] is like.meta["val"]


def test_an_operator_that_refuses_its_arguments_fails_where_it_is_inserted():
    graph = joint("dense")
    (like,) = nodes(graph, aten.mm.default)[1:]
    with graph.module.graph.inserting_after(like), pytest.raises(Exception, match=r"size|shape|view"):
        insert_call(graph.module.graph, aten.view.default, (like, [7, 7]), like=like)


def test_without_a_fake_value_anywhere_it_says_so():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(AssertionError, match="no fake tensor among the arguments"):
        insert_call(graph, aten.neg.default, (1.0,), like=x)
