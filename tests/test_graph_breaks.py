"""Graph breaks inside expert blocks are said once, with the line; others are nobody's business."""

import inspect
import logging

import pytest
import torch
from tiny_models import BF16, ROWS, ends_of
from torch import Tensor, nn

import gtp_compile
from gtp_compile import GroupedLinear, graph_breaks
from gtp_compile.testing import fake_mesh

WIDTH = 16
COUNTS = (7, 0, ROWS - 7)


class Stacked(nn.Module):
    """Two GEMMs of stacked weights, Python between them or before."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.up = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            torch._dynamo.graph_break()  # before
        x = torch._grouped_mm(x, self.up, offs=ends_of(*COUNTS))
        if self.where == "between":
            torch._dynamo.graph_break()  # between
        return torch._grouped_mm(x, self.down, offs=ends_of(*COUNTS))


class Discrete(nn.Module):
    """The block around two GroupedLinears."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down = (GroupedLinear(3, WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x, torch.tensor(COUNTS))
        torch._dynamo.graph_break()  # discrete
        return self.down(x, torch.tensor(COUNTS))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module], where: str) -> None:
        super().__init__()
        self.where = where
        self.layers = nn.ModuleList([block(where), block(where)])
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.where == "outside":
            torch._dynamo.graph_break()
        return self.dense(x)


def line_of(block: type[nn.Module], comment: str) -> int:
    lines, first = inspect.getsourcelines(block)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))


def run(block: type[nn.Module], where: str, strict: bool = False) -> None:
    graph_breaks._said.cache_clear()
    with fake_mesh(2) as mesh:
        model = gtp_compile.shard(Model(block, where), mesh, param_dtype=BF16, src_data_rank=None)
        options = {"inner": "eager", "strict": strict}
        torch.compile(model, backend="gtp", options=options)(torch.randn(ROWS, WIDTH).to(BF16))


BREAKS = [(Stacked, "between"), (Stacked, "before"), (Discrete, "discrete")]


@pytest.mark.parametrize(("block", "where"), BREAKS)
def test_a_break_is_said_once_with_its_line(block, where, caplog):
    with caplog.at_level(logging.WARNING, "gtp_compile"):
        run(block, where)
    (said,) = [r.getMessage() for r in caplog.records if "graph break" in r.getMessage()]
    leader = "up" if block is Stacked else "up.weight0"
    assert said.startswith(
        f"{__file__}:{line_of(block, where)}: a graph break inside the experts of layers.0.{leader}, "
    )
    assert "at `torch._dynamo.graph_break()" in said


def test_strict_makes_it_an_error():
    with pytest.raises(Exception, match=r"strict: .*: a graph break inside the experts of layers\.0\.up, at `torch"):
        run(Stacked, "between", strict=True)


def test_breaks_elsewhere_are_not_said(caplog):
    with caplog.at_level(logging.WARNING, "gtp_compile"):
        run(Stacked, "outside")
    assert not [r for r in caplog.records if "graph break" in r.getMessage()]
