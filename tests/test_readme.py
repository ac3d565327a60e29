"""What the README says is made of what the code does: the before/after of a two-expert model, the table of what works.

GTP_UPDATE_README=1 .venv/bin/python -P -m pytest tests/test_readme.py      writes the blocks anew
"""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import listing, run
from torch import fx

import gtp_compile
from gtp_compile.passes import gemm_forms
from gtp_compile.passes.anchors import Finalize
from gtp_compile.pipeline import JOINT_PASSES
from gtp_compile.testing import JointGraph, capture_joint, fake_mesh

README = Path(__file__).parent.parent / "README.md"
TESTS = Path(__file__).parent
# The files whose tests say what works, in the order of the README's table.
WORKS = (
    "module_ops", "inits", "checkpoints", "padding", "meshes", "both_forms", "norms", "unsharded", "regional",
    "eager_loops", "expert_lists", "adapters", "beside",
)  # fmt: skip
LAST = "insert_collectives"


def render_excerpt() -> str:
    """Two experts on two ranks, float32 shards, computed with in bf16: their gradient's path before and after."""
    torch.manual_seed(0)
    with fake_mesh(2) as mesh:
        model = gtp_compile.GroupedLinear(2, 4, 8, bias=False)
        gtp_compile.shard(model, mesh, param_dtype=torch.bfloat16)
        before = capture_joint(model, torch.randn(6, 4).to(torch.bfloat16), [2, 4])
    passes = [p.__name__ for p in JOINT_PASSES]
    after = run(before.copy(), *passes[: passes.index(LAST) + 1])
    names = readable_names(before)
    parts = [f"# before the first pass\n{listing(wgrad_path(before))}", f"# after {LAST}\n{listing(wgrad_path(after))}"]
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), "\n\n".join(parts))
    return f"```\n{text}\n```\n"


def readable_names(graph: JointGraph) -> dict[str, str]:
    """What the graph's inputs are, by the names that they have in it."""
    (anchor,) = Finalize.find(graph.module.graph)
    dy, x, offs = anchor.grad.args[:3]
    names = {dy.name: "dy", x.name: "x", offs.name: "offs"}
    for i, (shard, main_grad) in enumerate(zip(anchor.shards, anchor.main_grads, strict=True)):
        names |= {shard.name: f"weight{i}", main_grad.name: f"main_grad{i}"}
    return names


def wgrad_path(graph: JointGraph) -> list[fx.Node]:
    """The weight gradient's GEMM and everything that is made of it, in order."""
    on_path: set[fx.Node] = set()
    for node in graph.module.graph.nodes:
        if "wgrad" in str(node.target) or on_path.intersection(node.all_input_nodes):
            on_path.add(node)
    return [n for n in graph.module.graph.nodes if n in on_path]


def test_the_excerpt_shows_the_rewrite():
    before, after = render_excerpt().split(f"# after {LAST}")
    assert "bf16[2, 8, 4] = gtp.grouped_wgrad" in before
    assert "gtp.finalize" in before
    assert "f32[2, 2, 4, 4] = gtp.grouped_wgrad_parts" in after  # [ranks, experts, out / ranks, in]
    assert after.count("reduce_scatter_tensor(") == 1
    assert after.count("aten.add(") == 2  # one main_grad for each expert
    assert "gtp.finalize" not in after


def test_the_excerpt_is_the_same_on_every_machine():
    text = render_excerpt()
    assert text == render_excerpt()
    assert not re.search(r"/|\.py|0x", text)


def render_works() -> str:
    """A row for each test that is marked with `works(what, happens)`."""
    files = [*(TESTS / "distributed" / f"test_{name}.py" for name in WORKS), TESTS / "test_two_gpus.py"]
    rows = [f"| {what} | {happens} | {test} |" for file in files for what, happens, test in marked(file)]
    return "\n".join(["| you do | what happens | test |", "| --- | --- | --- |", *rows, ""])


def marked(file: Path) -> Iterator[tuple[str, str, str]]:
    """(what, happens, link) of each marked test of a file, in its order; the file is read, not imported."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.works":
                    what, happens = (ast.literal_eval(arg) for arg in mark.args)
                    yield what, happens, f"[{file.stem.removeprefix('test_')}]({file.relative_to(TESTS.parent)})"


def render_form() -> str:
    """The finder of one form, with its row of the list."""
    (row,) = (f for f in gemm_forms.FORMS if f.find is gemm_forms.find_bmm)
    targets = ", ".join(map(str, row.targets))
    return f'```python\n{inspect.getsource(row.find)}\n\nForm("{row.name}", find_bmm, ({targets}))  # in FORMS\n```\n'


def check_block(name: str, rendered: str) -> None:
    """The README's block is `rendered`; with GTP_UPDATE_README it is made so."""
    block = re.compile(rf"(?<=<!-- {name}:begin -->\n).*?(?=<!-- {name}:end -->)", re.DOTALL)
    text = README.read_text()
    if os.environ.get("GTP_UPDATE_README"):
        text = block.sub(lambda _: rendered, text)
        README.write_text(text)
    found = block.search(text)
    assert found, f"README.md has no block between <!-- {name}:begin --> and <!-- {name}:end -->"
    assert found[0] == rendered, f"the README's block {name!r} is stale: run this test with GTP_UPDATE_README=1"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the README shows the graph of torch 2.13")
def test_the_readme_shows_the_excerpt():
    check_block("excerpt", render_excerpt())


def test_the_readme_shows_a_form():
    check_block("form", render_form())


def test_every_form_is_in_the_readmes_table():
    named = re.findall(r"^\| `(\w+)` \| .*\| .*\|$", README.read_text(), re.MULTILINE)
    assert {f.name for f in gemm_forms.FORMS} <= set(named)


def test_the_readme_shows_what_works():
    check_block("works", render_works())


@pytest.mark.parametrize("name", WORKS)
def test_every_such_file_has_rows(name):
    assert list(marked(TESTS / "distributed" / f"test_{name}.py"))
