"""The protocol of distributed weights and the dtype rule.

The fakes act by powers of two: materializing for the forward multiplies by 2, for the backward by 4, finalizing by 8,
and member i marks its own buffer with 2**i. A hook that is skipped, called twice or taken from the wrong member shows
as an exact wrong number.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from gtp_compile.weights import (
    DistributedWeight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    weight_grad_buffers,
    weight_grad_dtype,
)

ROOT = Path(__file__).parent.parent
SHAPE = (4, 6)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class FakeShard(nn.Parameter):
    """A shard of one row that speaks for `size` weights; its full weights hold the member's index + 1."""

    is_distributed_weight = True

    def __new__(cls, size: int = 1, index: int = 0, buffer: torch.Tensor | None = None) -> "FakeShard":
        return super().__new__(cls, torch.ones(1, SHAPE[1]))

    def __init__(self, size: int = 1, index: int = 0, buffer: torch.Tensor | None = None) -> None:
        self.size = size
        self.buffer = torch.full(SHAPE, 2.0**index) if buffer is None else buffer
        self.calls: list[str] = []

    def full_weights(self, factor: float) -> torch.Tensor | list[torch.Tensor]:
        full = [torch.full(SHAPE, factor * (i + 1)) for i in range(self.size)]
        return full if self.size > 1 else full[0]

    def materialize_group_for_forward(self) -> torch.Tensor | list[torch.Tensor]:
        self.calls.append("forward")
        return self.full_weights(2.0)

    def materialize_group_for_backward(self) -> torch.Tensor | list[torch.Tensor]:
        self.calls.append("backward")
        return self.full_weights(4.0)

    def finalize_group_grads(self, wgrads):
        self.calls.append("finalize")
        return [8 * g for g in wgrads] if isinstance(wgrads, list) else 8 * wgrads

    def grad_buffer(self) -> torch.Tensor:
        self.calls.append("buffer")
        return self.buffer


class Untouchable:
    """A follower that nothing may look at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"a follower was asked for {name}")


def plain(main_grad_dtype: torch.dtype | None = None) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(SHAPE))
    if main_grad_dtype is not None:
        weight.main_grad = torch.zeros(SHAPE, dtype=main_grad_dtype)
    return weight


def with_main_grad(weight: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    weight.main_grad = None if dtype is None else torch.zeros(weight.shape, dtype=dtype)
    return weight


def values(tensors: list[torch.Tensor]) -> list[float]:
    for tensor in tensors:
        assert tensor.min() == tensor.max()
    return [tensor.flatten()[0].item() for tensor in tensors]


# The protocol


def test_a_weight_with_every_hook_satisfies_the_protocol():
    assert isinstance(FakeShard(), DistributedWeight)
    assert not isinstance(plain(), DistributedWeight)


def test_the_marker_decides():
    unmarked = FakeShard()
    unmarked.is_distributed_weight = False
    assert is_distributed_weight(FakeShard()) is True
    assert is_distributed_weight(unmarked) is False
    assert is_distributed_weight(plain()) is False
    assert is_distributed_weight(torch.zeros(2)) is False


class MarkedModule:
    is_distributed_weight = True


@pytest.mark.parametrize(
    "call",
    [
        is_distributed_weight,
        materialize_weight_for_forward,
        materialize_weight_for_backward,
        lambda w: finalize_weight_grads(w, [torch.zeros(2)]),
        lambda w: weight_grad_buffers(w, SHAPE, BF16, "cpu"),
        lambda w: weight_grad_buffers([FakeShard(), w], SHAPE, BF16, "cpu"),
        lambda w: weight_grad_dtype(w, BF16),
    ],
    ids=["is", "forward", "backward", "finalize", "buffers", "buffers of a follower", "dtype"],
)
def test_the_marker_on_a_non_tensor_is_a_type_error(call):
    with pytest.raises(TypeError, match=r"MarkedModule; expected a torch\.Tensor subclass"):
        call(MarkedModule())


@pytest.mark.parametrize(
    "call",
    [
        materialize_weight_for_forward,
        materialize_weight_for_backward,
        lambda w: finalize_weight_grads(w, []),
        lambda w: weight_grad_buffers(w, SHAPE, BF16, "cpu"),
        lambda w: weight_grad_dtype(w, BF16),
    ],
    ids=["forward", "backward", "finalize", "buffers", "dtype"],
)
@pytest.mark.parametrize("empty", [[], ()], ids=["list", "tuple"])
def test_an_empty_group_is_a_value_error(call, empty):
    with pytest.raises(ValueError, match="weights is empty"):
        call(empty)


# Materializing

MATERIALIZE = [
    pytest.param(materialize_weight_for_forward, "forward", 2.0, id="forward"),
    pytest.param(materialize_weight_for_backward, "backward", 4.0, id="backward"),
]


@pytest.mark.parametrize(("materialize", "call", "factor"), MATERIALIZE)
@pytest.mark.parametrize("size", [1, 3])
def test_a_bare_leader_speaks_for_its_whole_group(materialize, call, factor, size):
    leader = FakeShard(size)
    assert values(materialize(leader)) == [factor * (i + 1) for i in range(size)]
    assert leader.calls == [call]


@pytest.mark.parametrize(("materialize", "call", "factor"), MATERIALIZE)
@pytest.mark.parametrize("sequence", [list, tuple])
def test_the_leader_of_a_list_is_asked_once_and_followers_are_not_touched(materialize, call, factor, sequence):
    leader = FakeShard(3)
    full = materialize(sequence([leader, Untouchable(), Untouchable()]))
    assert values(full) == [factor, 2 * factor, 3 * factor]
    assert leader.calls == [call]


@pytest.mark.parametrize(("materialize", "call", "factor"), MATERIALIZE)
def test_plain_weights_come_back_as_they_are(materialize, call, factor):
    weights = [plain(), plain()]
    for given_weights in (weights, tuple(weights)):
        result = materialize(given_weights)
        assert isinstance(result, list)
        assert [id(w) for w in result] == [id(w) for w in weights]
    (bare,) = materialize(weights[0])
    assert bare is weights[0]


@pytest.mark.parametrize(("materialize", "call", "factor"), MATERIALIZE)
def test_a_plain_first_weight_makes_a_plain_group(materialize, call, factor):
    first, follower = plain(), FakeShard(2)
    result = materialize([first, follower])
    assert result[0] is first
    assert result[1] is follower
    assert follower.calls == []


@pytest.mark.parametrize(("materialize", "call", "factor"), MATERIALIZE)
def test_a_leader_that_forgets_a_member_is_refused(materialize, call, factor):
    with pytest.raises(RuntimeError, match="FakeShard materialized 2 weights for a group of 3"):
        materialize([FakeShard(2), plain(), plain()])


# Finalizing


@pytest.mark.parametrize("size", [1, 2])
def test_finalizing_asks_the_leader_once(size):
    leader = FakeShard(size)
    grads = [torch.full(SHAPE, 2.0**i) for i in range(size)]
    for weights in (leader, [leader, *[Untouchable()] * (size - 1)]):
        leader.calls.clear()
        assert values(finalize_weight_grads(weights, grads)) == [8 * 2.0**i for i in range(size)]
        assert leader.calls == ["finalize"]


def test_a_single_gradient_travels_bare_in_both_directions():
    assert values(finalize_weight_grads(FakeShard(), torch.ones(SHAPE))) == [8.0]
    assert values(finalize_weight_grads(FakeShard(), (torch.ones(SHAPE),))) == [8.0]


class Returning(FakeShard):
    """A leader whose finalize returns what the test says."""

    def finalize_group_grads(self, wgrads):
        return self.returns


@pytest.mark.parametrize("count", [1, 3])
def test_none_alone_is_one_none_per_gradient(count):
    leader = Returning(count)
    leader.returns = None
    assert finalize_weight_grads(leader, [torch.ones(SHAPE)] * count) == [None] * count


def test_dummies_and_single_nones_pass_through():
    dummy = torch.empty(0)
    leader = Returning(3)
    leader.returns = (dummy, None, dummy)
    result = finalize_weight_grads([leader, plain(), plain()], [torch.ones(SHAPE)] * 3)
    assert isinstance(result, list)
    assert result[0] is dummy
    assert result[1] is None
    assert result[2] is dummy


def test_a_frozen_member_has_no_gradient_and_the_leader_sees_that():
    leader = Returning(2)
    leader.finalize_group_grads = lambda wgrads: [None if g is None else 8 * g for g in wgrads]
    first, second = finalize_weight_grads([leader, plain()], [None, torch.ones(SHAPE)])
    assert first is None
    assert second is not None
    assert values([second]) == [8.0]


@pytest.mark.parametrize("returned", [torch.zeros(2), [torch.zeros(2)], [None] * 3, []], ids=["bare", "1", "3", "0"])
def test_a_wrong_number_of_finalized_gradients_is_refused(returned):
    leader = Returning(2)
    leader.returns = returned
    with pytest.raises(RuntimeError, match=r"Returning returned \d gradients for 2"):
        finalize_weight_grads([leader, plain()], [torch.ones(SHAPE)] * 2)


def test_a_wrong_number_of_given_gradients_is_refused():
    leader = FakeShard(2)
    with pytest.raises(ValueError, match="1 gradients for a group of 2"):
        finalize_weight_grads([leader, plain()], torch.ones(SHAPE))
    with pytest.raises(ValueError, match="0 gradients for a group of 1"):
        finalize_weight_grads(leader, [])
    assert leader.calls == []


def test_the_gradients_of_plain_weights_come_back_as_they_are():
    grads = [torch.ones(SHAPE), None]
    result = finalize_weight_grads([plain(), FakeShard()], tuple(grads))
    assert isinstance(result, list)
    assert result[0] is grads[0]
    assert result[1] is None
    assert finalize_weight_grads(plain(), None) == [None]


# Buffers


def test_every_distributed_member_brings_its_own_buffer():
    members = [FakeShard(3, index) for index in range(3)]
    buffers = weight_grad_buffers(members, SHAPE, BF16, "cpu")
    assert values(buffers) == [1.0, 2.0, 4.0]
    assert [member.calls for member in members] == [["buffer"]] * 3


@pytest.mark.parametrize("main_grad", [None, BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("compute", [BF16, FP16, FP32], ids=str)
def test_plain_followers_of_a_leader_get_scratch_in_its_dtype(main_grad, compute):
    leader = with_main_grad(FakeShard(3), main_grad)
    # The followers' own main_grad is of another dtype than everything else here, and does not count.
    followers = [plain(torch.float8_e5m2), plain(torch.float8_e5m2)]
    own, *scratch = weight_grad_buffers([leader, *followers], SHAPE, compute, "cpu")
    assert own is leader.buffer
    assert leader.calls == ["buffer"]
    expected = compute if main_grad is None else main_grad
    assert [(tuple(b.shape), b.dtype) for b in scratch] == [(SHAPE, expected)] * 2
    assert len({b.data_ptr() for b in (own, *scratch)}) == 3


def test_mixed_followers_each_get_what_they_are_due():
    leader, second, third = with_main_grad(FakeShard(3), FP32), plain(), FakeShard(3, index=2)
    buffers = weight_grad_buffers((leader, second, third), SHAPE, BF16, "cpu")
    assert buffers[0] is leader.buffer
    assert buffers[1].dtype is FP32
    assert buffers[2] is third.buffer


def test_a_plain_follower_is_asked_for_nothing_but_its_marker():
    class MarkerOnly:
        def __getattribute__(self, name: str) -> object:
            if name == "is_distributed_weight":
                raise AttributeError(name)
            raise AssertionError(f"a plain follower was asked for {name}")

    leader = with_main_grad(FakeShard(2), FP32)
    assert weight_grad_buffers([leader, MarkerOnly()], SHAPE, BF16, "cpu")[1].dtype is FP32


@pytest.mark.parametrize("listed", [False, True], ids=["bare", "list"])
def test_a_bare_weight_is_a_group_of_one(listed):
    shard, other = FakeShard(index=3), plain(FP32)
    assert values(weight_grad_buffers([shard] if listed else shard, SHAPE, BF16, "cpu")) == [8.0]
    (scratch,) = weight_grad_buffers([other] if listed else other, torch.Size(SHAPE), BF16, torch.device("cpu"))
    assert (tuple(scratch.shape), scratch.dtype) == (SHAPE, BF16)


def test_a_group_with_a_plain_first_weight_gets_scratch_only():
    follower = with_main_grad(FakeShard(2), FP32)
    buffers = weight_grad_buffers([plain(FP32), follower], SHAPE, BF16, "cpu")
    assert [b.dtype for b in buffers] == [BF16, BF16]
    assert follower.calls == []


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 6), (4, 7), (24,), (4, 6, 1)], ids=str)
def test_every_wrong_shape_is_refused_with_the_index_of_the_member(wrong, shape):
    members = [FakeShard(3, index, buffer=torch.zeros(shape) if index == wrong else None) for index in range(3)]
    with pytest.raises(RuntimeError, match=rf"Member {wrong} .*the wgrad GEMM needs \(4, 6\)"):
        weight_grad_buffers(members, SHAPE, BF16, "cpu")


def test_a_member_that_brings_no_tensor_is_refused():
    member = FakeShard(2, 1)
    member.grad_buffer = lambda: None
    with pytest.raises(RuntimeError, match=r"Member 1 .*NoneType.*the wgrad GEMM needs"):
        weight_grad_buffers([FakeShard(2), member], SHAPE, BF16, "cpu")


def test_members_that_share_memory_are_refused():
    shared = torch.zeros(SHAPE)
    members = [FakeShard(3, 0), FakeShard(3, 1, shared), FakeShard(3, 2, shared.view(SHAPE))]
    with pytest.raises(RuntimeError, match=r"Members 1 and 2 .*overlap"):
        weight_grad_buffers(members, SHAPE, BF16, "cpu")

    rows = torch.zeros(7, 6)
    with pytest.raises(RuntimeError, match=r"Members 0 and 1 .*overlap"):
        weight_grad_buffers([FakeShard(2, 0, rows[3:]), FakeShard(2, 1, rows[:4])], SHAPE, BF16, "cpu")


def test_slices_of_one_packed_buffer_do_not_share_memory():
    stacked, columns = torch.zeros(2, *SHAPE), torch.zeros(4, 12)
    halves, turns = (columns[:, :6], columns[:, 6:]), (columns[:, ::2], columns[:, 1::2])
    for first, second in (stacked, halves, turns):
        buffers = weight_grad_buffers([FakeShard(2, 0, first), FakeShard(2, 1, second)], SHAPE, BF16, "cpu")
        assert buffers[0] is first
        assert buffers[1] is second


@given(
    geometry=st.lists(
        st.tuples(st.integers(0, 12), st.tuples(st.integers(0, 7), st.integers(0, 7)), st.sampled_from([FP32, BF16])),
        min_size=2,
        max_size=2,
    )
)
def test_the_overlap_check_agrees_with_a_count_of_bytes(geometry):
    arena = torch.zeros(512, dtype=torch.uint8)
    buffers, covered = [], []
    for offset, (row, column), dtype in geometry:
        buffers.append(arena.view(dtype).as_strided((3, 4), (row, column), offset))
        starts = [(offset + i * row + j * column) * dtype.itemsize for i in range(3) for j in range(4)]
        covered.append({start + byte for start in starts for byte in range(dtype.itemsize)})
    members = [FakeShard(2, index, buffer) for index, buffer in enumerate(buffers)]
    if covered[0] & covered[1]:
        with pytest.raises(RuntimeError, match="overlap"):
            weight_grad_buffers(members, (3, 4), BF16, "cpu")
    else:
        assert len(weight_grad_buffers(members, (3, 4), BF16, "cpu")) == 2


def test_buffers_without_memory_cannot_overlap():
    empty = torch.zeros(0, 6)
    assert len(weight_grad_buffers([FakeShard(2, 0, empty), FakeShard(2, 1, empty)], (0, 6), BF16, "cpu")) == 2
    meta = [FakeShard(2, index, torch.zeros(SHAPE, device="meta")) for index in range(2)]
    assert len(weight_grad_buffers(meta, SHAPE, BF16, "meta")) == 2


# The dtype rule


@pytest.mark.parametrize("compute", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("main_grad", ["absent", None, BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["plain", "distributed", "leader only"])
@pytest.mark.parametrize("layout", ["bare", "stacked", "discrete"])
def test_truth_table(kind, main_grad, compute, layout):
    first = plain() if kind == "plain" else FakeShard(3)
    if main_grad != "absent":
        with_main_grad(first, main_grad)
    followers = [with_main_grad(FakeShard(), FP64) if kind == "distributed" else plain(FP64) for _ in range(2)]
    weights = {"bare": first, "stacked": [first], "discrete": [first, *followers]}[layout]
    counts = kind != "plain" and isinstance(main_grad, torch.dtype)
    assert weight_grad_dtype(weights, compute) is (main_grad if counts else compute)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_follower_is_never_touched(sequence):
    leader = with_main_grad(FakeShard(2), FP32)
    assert weight_grad_dtype(sequence([leader, Untouchable()]), BF16) is FP32
    assert weight_grad_dtype(sequence([FakeShard(2), Untouchable()]), BF16) is BF16
    assert weight_grad_dtype(sequence([plain(FP32), Untouchable()]), BF16) is BF16


def test_a_frozen_leader_still_sets_the_dtype():
    assert weight_grad_dtype(with_main_grad(FakeShard(), FP32).requires_grad_(False), BF16) is FP32


def test_main_grad_may_come_and_go():
    shard = FakeShard()
    assert weight_grad_dtype(shard, BF16) is BF16
    shard.main_grad = torch.zeros(SHAPE)
    assert weight_grad_dtype(shard, BF16) is FP32
    shard.main_grad = torch.zeros(SHAPE, dtype=FP64)
    assert weight_grad_dtype(shard, BF16) is FP64
    del shard.main_grad
    assert weight_grad_dtype(shard, BF16) is BF16


# Under Dynamo


class Leaf(nn.Parameter):
    """The least that Dynamo has to trace: a parameter class with the marker and the hooks."""

    is_distributed_weight = True

    def materialize_group_for_forward(self) -> torch.Tensor:
        return self * 2

    def materialize_group_for_backward(self) -> torch.Tensor:
        return self * 4

    def finalize_group_grads(self, wgrads):
        return [8 * g for g in wgrads] if isinstance(wgrads, list) else 8 * wgrads

    def grad_buffer(self) -> torch.Tensor:
        return torch.zeros(SHAPE)


class Linear(nn.Module):
    """Returns its product in the dtype of the rule, so that the graph shows which dtype was read."""

    def __init__(self, weight_class: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight = weight_class(torch.ones(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).to(weight_grad_dtype([self.weight], BF16))


@pytest.fixture
def compiled() -> Iterator[tuple]:
    torch._dynamo.reset()
    counter = CompileCounter()
    yield torch.compile(lambda layer, x: layer(x), backend=counter, fullgraph=True), counter
    torch._dynamo.reset()


def test_a_compiled_forward_follows_main_grad(compiled):
    run, _ = compiled
    layer, x = Linear(Leaf), torch.ones(2, 6)
    assert run(layer, x).dtype is BF16
    for dtype in (FP32, FP64, None, FP32):
        with_main_grad(layer.weight, dtype)
        assert run(layer, x).dtype is (dtype or BF16)
    del layer.weight.main_grad
    assert run(layer, x).dtype is BF16


def test_a_main_grad_of_the_same_dtype_is_replaced_without_a_compilation(compiled):
    run, counter = compiled
    layer, x = Linear(Leaf), torch.ones(2, 6)
    for _ in range(3):
        with_main_grad(layer.weight, FP32)
        assert run(layer, x).dtype is FP32
    assert counter.frame_count == 1


def test_layers_share_a_graph_and_each_keeps_its_own_dtype(compiled):
    run, counter = compiled
    first, second, x = Linear(Leaf), Linear(Leaf), torch.ones(2, 6)
    with_main_grad(first.weight, FP32)
    with_main_grad(second.weight, FP32)
    assert run(first, x).dtype is FP32
    assert run(second, x).dtype is FP32
    assert counter.frame_count == 1
    with_main_grad(second.weight, FP64)
    assert run(second, x).dtype is FP64
    assert run(first, x).dtype is FP32
    assert counter.frame_count == 2


def test_a_compiled_plain_layer_does_not_look_at_main_grad(compiled):
    run, counter = compiled
    layer, x = Linear(nn.Parameter), torch.ones(2, 6)
    assert run(layer, x).dtype is BF16
    with_main_grad(layer.weight, FP32)
    assert run(layer, x).dtype is BF16
    assert counter.frame_count == 1


def test_every_dispatcher_traces_without_a_graph_break():
    def step(leader, follower, x):
        (forward,) = materialize_weight_for_forward(leader)
        (backward,) = materialize_weight_for_backward([leader])
        own, scratch = weight_grad_buffers([leader, follower], SHAPE, BF16, x.device)
        grads = finalize_weight_grads([leader, follower], [own + 1, own + 2])
        return forward, backward, scratch, *grads

    leader = with_main_grad(Leaf(torch.ones(SHAPE)), FP32)
    torch._dynamo.reset()
    compiled_step = torch.compile(step, backend="eager", fullgraph=True)
    forward, backward, scratch, *grads = compiled_step(leader, plain(), torch.ones(1))
    assert values([forward, backward, *grads]) == [2.0, 4.0, 8.0, 16.0]
    assert scratch.dtype is FP32


# The rule has one home


def main_grad_dtype_reads(tree: ast.AST) -> list[ast.Attribute]:
    """`<...>.main_grad.dtype` and `getattr(<...>, "main_grad").dtype`."""

    def is_main_grad(node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            return any(isinstance(arg, ast.Constant) and arg.value == "main_grad" for arg in node.args)
        return isinstance(node, ast.Attribute) and node.attr == "main_grad"

    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "dtype" and is_main_grad(node.value)
    ]


def test_no_other_file_reads_main_grad_for_a_dtype():
    files = [path for folder in ("gtp_compile", "passes", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert ROOT / "gtp_compile" / "weights.py" in files
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path != ROOT / "gtp_compile" / "weights.py"
        for node in main_grad_dtype_reads(ast.parse(path.read_text()))
    ]
    assert not reads, f"call gtp_compile.weights.weight_grad_dtype instead: {reads}"


def test_in_the_protocol_only_weight_grad_dtype_reads_main_grad():
    tree = ast.parse((ROOT / "gtp_compile" / "weights.py").read_text())

    def mentions(node: ast.AST) -> int:
        return sum(
            (isinstance(n, ast.Constant) and n.value == "main_grad")
            or (isinstance(n, ast.Attribute) and n.attr == "main_grad")
            for n in ast.walk(node)
        )

    (rule,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "weight_grad_dtype"]
    assert mentions(rule) == 1
    assert mentions(tree) == mentions(rule)


def test_the_search_for_dtype_reads_finds_every_spelling():
    source = 'a = w.main_grad.dtype\nb = getattr(w, "main_grad", None).dtype\nc = w.main_grad.shape\nd = w.dtype\n'
    assert [node.lineno for node in main_grad_dtype_reads(ast.parse(source))] == [1, 2]
