"""The README's before/after of a two-expert model is what the passes do today.

GTP_UPDATE_README=1 .venv/bin/python -P -m pytest tests/test_readme.py      writes the block anew
"""

import os
import re
from pathlib import Path

import pytest
import torch
from tiny_models import listing, run
from torch import fx

import gtp_compile
from gtp_compile.passes.anchors import Finalize
from gtp_compile.pipeline import JOINT_PASSES
from gtp_compile.testing import JointGraph, capture_joint, fake_mesh

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?<=<!-- excerpt:begin -->\n).*?(?=<!-- excerpt:end -->)", re.DOTALL)
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
    assert "f32[2, 8, 4] = gtp.grouped_wgrad" in after
    assert after.count("reduce_scatter_tensor(") == 1
    assert after.count("aten.add(") == 2  # one main_grad for each expert
    assert "gtp.finalize" not in after


def test_the_excerpt_is_the_same_on_every_machine():
    text = render_excerpt()
    assert text == render_excerpt()
    assert not re.search(r"/|\.py|0x", text)


def test_the_readme_shows_the_excerpt():
    text = README.read_text() if README.exists() else ""
    if os.environ.get("GTP_UPDATE_README"):
        text = BLOCK.sub(lambda _: render_excerpt(), text)
        README.write_text(text)
    found = BLOCK.search(text)
    assert found, "README.md has no block between <!-- excerpt:begin --> and <!-- excerpt:end -->"
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the README shows the graph of torch 2.13")
    assert found[0] == render_excerpt(), "the README's excerpt is stale: run this test with GTP_UPDATE_README=1"
