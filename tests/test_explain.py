"""explain: what the compiler found, in one process, without communicating and without a trace in the model."""

import itertools
import json
import re

import pytest
import sympy
import torch
import torch.distributed as dist
from tiny_models import BF16, IN, OUT, ROWS, Blocks, Experts, ends_of, leader_only, shard_all, sharded
from torch import nn
from torch.distributed.tensor import Replicate

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.explaining import Explanation
from gtp_compile.pipeline import JOINT_PASSES, PASS_NAMES
from gtp_compile.testing import fake_mesh

RANKS = 64


def explain(model: nn.Module, *args, ranks: int = RANKS, loss_fn=None, options=None, **kwargs) -> Explanation:
    """Shard a model over a fake mesh, and explain it there."""
    with fake_mesh(ranks) as mesh:
        gtp_compile.shard(model, mesh, **{"param_dtype": BF16, "shard_fn": shard_all, **kwargs})
        return gtp_compile.explain(model, loss_fn, options=options)(*args)


class Layer(nn.Module):
    """Grouped experts, a router, a norm, a frozen weight, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.experts = GroupedLinear(2, IN, 2 * RANKS, bias=False)
        self.down = nn.Linear(2 * RANKS, RANKS, bias=False)
        self.frozen = nn.Linear(RANKS, RANKS, bias=False).requires_grad_(False)
        self.unused = nn.Linear(IN, RANKS, bias=False)

    def forward(self, x, m_splits):
        return self.frozen(self.down(self.experts(self.norm(x), m_splits)))


@pytest.fixture(scope="module")
def explained() -> Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return explain(Layer(), torch.randn(ROWS, IN).to(BF16), torch.tensor([ROWS - 9, 9]))


# Rows.


def test_the_rows_of_the_gemm_groups(explained):
    experts, down = explained.groups
    assert experts.weights == ["experts.weight0", "experts.weight1"]
    assert experts.leader == "experts.weight0"
    assert experts.layout == f"Shard(0) over {RANKS} ranks, avg"
    assert (experts.kind, experts.matched, experts.reason) == ("gemm", True, "")
    for row in (experts, down):
        hops = (row.gemm_dtype, row.scratch_dtype, row.wire_dtype, row.sum_dtype, row.main_grad_dtype)
        assert hops == ("float32",) * 5
        assert row.error is None


def test_the_other_rows(explained):
    rows = {r.leader: r for r in explained.others}
    assert set(rows) == {"norm.weight", "norm.bias", "frozen.weight", "unused.weight"}
    assert rows["norm.weight"].kind == "reduction"
    assert rows["norm.weight"].layout == f"Replicate() over {RANKS} ranks, avg"
    assert rows["norm.weight"].sum_dtype == "float32"
    assert rows["frozen.weight"].reason == "frozen: no gradient, no collective"
    assert rows["frozen.weight"].matched
    assert not rows["unused.weight"].matched
    assert "in no compiled graph that trains" in rows["unused.weight"].reason


def test_bytes_are_a_formula_and_its_value(explained):
    shapes = {"experts.weight0": (2, 2 * RANKS, IN), "down.weight": (RANKS, 2 * RANKS), "norm.weight": (IN,)}
    rows = {r.leader: r for r in [*explained.groups, *explained.others]}
    for leader, shape in shapes.items():
        row = rows[leader]
        names = {1: "N", 2: "NK", 3: "ENK"}[len(shape)]
        values = {**dict(zip(names, shape, strict=True)), "W": RANKS, "R": RANKS}
        formula = sympy.sympify(row.wire_formula, {n: sympy.Symbol(n) for n in values})
        assert formula.subs(values) == row.wire_bytes
    assert rows["experts.weight0"].wire_bytes == 4 * 2 * 2 * RANKS * IN * (RANKS - 1) // RANKS
    assert rows["frozen.weight"].wire_bytes == 0


def test_the_passes_and_their_graphs(explained):
    (runs,) = explained.graphs
    assert [r.name for r in runs] == list(PASS_NAMES)
    for before, after in itertools.pairwise(runs[:5]):
        assert before.after == after.before
    after = {run.name: run.after for run in runs}
    assert "gtp.finalize" in runs[0].before
    assert "reduce_scatter_tensor" in after["insert_collectives"]
    assert "copy_" in after["accumulate_main_grads"]


def test_it_prints(explained):
    text = str(explained)
    assert re.search(r"experts\.weight0 \(\+1\) +Shard\(0\) +f32 +f32 +f32 +f32 +f32 +8,064", text)
    for name in (*PASS_NAMES, "frozen: no gradient", "norm.bias"):
        assert name in text


def test_it_is_plain_data(explained):
    data = json.loads(json.dumps(explained.to_dict()))
    assert set(data) == {"groups", "others", "graphs"}
    assert data["groups"][0]["weights"] == ["experts.weight0", "experts.weight1"]
    assert {"pass", "phase", "matched", "changed", "skipped", "ops", "before", "after"} <= set(data["graphs"][0][0])


def test_without_retype_the_rows_show_the_fault():
    found = explain(
        Experts(), torch.randn(ROWS, IN), ends_of(7, 0, 12, 5), ranks=4, options={"disable": ["retype_wgrads"]}
    )
    (row,) = found.groups
    hops = (row.gemm_dtype, row.scratch_dtype, row.wire_dtype, row.sum_dtype, row.main_grad_dtype)
    assert hops == (*["bfloat16"] * 4, "float32")


def test_an_unmatched_weight_says_why():
    with fake_mesh(4) as mesh:
        tiny = sharded("scaled", mesh)
        found = gtp_compile.explain(tiny.model)(*tiny.args)
        (row,) = found.groups
        assert not row.matched
        assert (
            "aten.mul.Tensor) is no known form of a weight gradient; it arrives rounded to torch.bfloat16" in row.reason
        )
        skips = [s.reason for runs in found.graphs for run in runs for s in run.report.skipped]
        assert any("no pass knows a weight gradient through aten.mul.Tensor" in s for s in skips)
        with pytest.raises(Exception, match=r"strict: weight gradients that would be summed after a rounding: .*mul"):
            gtp_compile.explain(tiny.model, options={"strict": True})(*tiny.args)


def test_a_leader_alone_is_a_group_of_one():
    model = GroupedLinear(3, IN, OUT, bias=False, dtype=BF16)
    found = explain(model, torch.randn(ROWS, IN).to(BF16), torch.tensor([7, 0, 17]), ranks=4, shard_fn=leader_only)
    (row,) = found.groups
    assert row.weights == ["weight0"]
    assert row.matched
    assert not found.others  # followers are plain: none of our business


def test_equal_layers_are_rows_of_their_own():
    found = explain(Blocks(3), torch.randn(ROWS, IN), ranks=4)
    assert [r.leader for r in found.groups] == [
        f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down")
    ]


def test_equal_layers_that_share_a_graph_are_rows_of_their_own():
    model = Blocks(3)
    for block in model.blocks:
        block.compile(backend="gtp")  # explain compiles afresh all the same

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model.blocks

        def forward(self, x):
            for block in self.blocks:
                torch._dynamo.graph_break()
                x = block(x)
            return x

    found = explain(Apart(), torch.randn(ROWS, IN).to(BF16).requires_grad_(), ranks=4)
    assert [r.leader for r in found.groups] == [
        f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down")
    ]
    assert all(r.matched for r in found.groups)


class Broken(nn.Module):
    """Two graphs, and Python between them that reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, OUT, bias=False)
        self.second = nn.Linear(OUT, IN, bias=False)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_graph_break():
    found = explain(Broken(), torch.randn(ROWS, IN).to(BF16), ranks=4)
    assert len(found.graphs) == 2
    assert [r.leader for r in found.groups] == ["first.weight", "second.weight"]
    assert all(r.matched for r in found.groups)


def test_a_weight_that_runs_in_eager_only():
    model = Broken()
    model.second.forward = torch.compiler.disable(model.second.forward)
    found = explain(model, torch.randn(ROWS, IN).to(BF16), ranks=4)
    assert [r.leader for r in found.groups] == ["first.weight"]
    (row,) = found.others
    assert (row.leader, row.kind, row.matched) == ("second.weight", "eager", False)
    assert "its gradient is rounded as eager rounds it" in row.reason


# No communication, no trace.


def test_it_never_communicates(no_communication):
    with fake_mesh(RANKS) as mesh:
        model = gtp_compile.shard(Layer(), mesh, param_dtype=BF16, shard_fn=shard_all)
        no_communication()
        found = gtp_compile.explain(model, lambda out: out.float().sum())(
            torch.randn(ROWS, IN).to(BF16), torch.tensor([ROWS, 0])
        )
    assert len(found.groups) == 2


def test_a_weight_read_in_eager_does_not_communicate(no_communication):
    with fake_mesh(4) as mesh:
        model = gtp_compile.shard(Broken(), mesh, param_dtype=BF16, shard_fn=shard_all)
        model.second.forward = torch.compiler.disable(model.second.forward)
        no_communication()
        gtp_compile.explain(model)(torch.randn(ROWS, IN).to(BF16))


@pytest.fixture
def no_communication(monkeypatch):
    """Whatever path a collective takes, it ends in an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("a collective ran")

    def forbid() -> None:
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier"):
            monkeypatch.setattr(dist, name, refuse)
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            library.impl(name, refuse, "CPU", allow_override=True)
        with pytest.raises(AssertionError, match="a collective ran"):
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "0")

    library = torch.library.Library("_c10d_functional", "IMPL")
    yield forbid
    library._destroy()


class Stateful(nn.Module):
    """A buffer that forward changes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(IN)
        self.up = nn.Linear(IN, OUT, bias=False)

    def forward(self, x):
        return torch.nn.functional.dropout(self.up(self.norm(x)), 0.5)


def test_the_model_is_left_as_it_was():
    with fake_mesh(4) as mesh:
        model = gtp_compile.shard(
            Stateful(), mesh,
            shard_fn=lambda fqn, module, param: shard_all(fqn, module, param) if "up" in fqn else Replicate(),
        )  # fmt: skip
        weight = model.up._parameters["weight"]
        weight.main_grad.fill_(3.0)
        weight.grad = torch.ones_like(weight)
        grad, main_grad = weight.grad, weight.main_grad
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        x = torch.randn(ROWS, IN) + 2.0
        random = torch.get_rng_state()
        gtp_compile.explain(model, lambda out: out.sum())(x)
        assert torch.equal(random, torch.get_rng_state())
    assert weight.grad is grad
    assert weight.main_grad is main_grad
    assert torch.equal(main_grad, torch.full_like(main_grad, 3.0))
    assert torch.equal(grad.to_local(), torch.ones_like(grad.to_local()))
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert model.up._parameters["weight"].leaf.grad is None


def test_a_model_that_fails_is_left_as_it_was():
    def fail(out):
        raise KeyError("no")

    with fake_mesh(4) as mesh:
        model = gtp_compile.shard(nn.Linear(IN, OUT), mesh, shard_fn=shard_all)
        with pytest.raises(KeyError):
            gtp_compile.explain(model, fail)(torch.randn(3, IN))
        assert all(p.leaf.emit is None for p in model.parameters())


# Files.


def test_debug_dir_gets_every_step(tmp_path):
    explain(nn.Linear(IN, OUT), torch.randn(3, IN).to(BF16), ranks=4, options={"debug_dir": str(tmp_path)})
    (folder,) = tmp_path.iterdir()
    files = {p.name: p.read_text() for p in folder.iterdir()}
    assert "00_joint.captured.py" in files
    for number, name in enumerate(PASS_NAMES, 1):
        assert "after " + name in files[f"{number:02d}_{name}.after.py"].splitlines()[0]
        assert f"{number:02d}_{name}.diff" in files
    assert f"{len(JOINT_PASSES):02d}_backward.captured.py" in files
    diff = files["02_retype_wgrads.diff"]
    assert re.search(r"^-.*torch\.ops\.aten\.mm\.default", diff, re.M)
    assert re.search(r"^\+.*torch\.ops\.gtp\.dense_wgrad\.default", diff, re.M)
    assert files["03_fuse_wgrads.diff"].splitlines()[-1] == "unchanged"
