"""Warm compile caches across processes: reused where nothing changed, never where a pass would decide otherwise."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("cache_program.py")

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {}
# Everything here differs from BASE in one thing that a pass, or what it emits, depends on.
OTHERS: dict[str, dict[str, Any]] = {
    "retyping_off": {"options": {"disable": ["retype_wgrads"]}},
    "four_ranks_same_shards": {"world": 4, "out": 64},
    "four_ranks_same_weight": {"world": 4},
    "main_grad_bf16": {"main_grad": "bfloat16"},
    "sum": {"reduce_op": "sum"},
    "strict": {"options": {"strict": True}},
    "opt_in": {"options": {"accumulate_into_main_grad": True}},
    "inductor_option": {"options": {"max_fusion_size": 7}},
}
WIRE = {"retyping_off": "bfloat16", "main_grad_bf16": "bfloat16"}


def run(cache: Path, requests: list[dict[str, Any]], package: Path | None = None) -> list[dict[str, Any]]:
    """A fresh process over the caches in `cache`, with the package from `package` (or as installed)."""
    path = [str(package)] if package else []
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT / "tests")]),
    }
    command = [sys.executable, "-P", str(PROGRAM), json.dumps(requests)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def outcome(found: dict[str, Any]) -> str:
    return next((kind for kind in ("hit", "miss", "bypass") if found[kind]), "uncached")


@pytest.fixture
def warm(tmp_path):
    """A cache folder in which one process has left its graphs of BASE."""
    (cold,) = run(tmp_path / "cache", [BASE])
    assert outcome(cold) == "miss"
    assert cold["wire"] == [["float32", 512]]
    return tmp_path / "cache"


def test_warm_caches(warm, subtests):
    """One process after another, each over what those before have left."""
    names = list(OTHERS)
    eager = {"options": {"inner": "eager"}}
    found = run(warm, [BASE, eager, *(OTHERS[n] for n in names)])
    again = run(warm, [eager, *(OTHERS[n] for n in reversed(names)), BASE])
    with subtests.test("nothing_changed"):
        assert outcome(found[0]) == "hit" == outcome(again[-1])
        assert found[0]["wire"] == again[-1]["wire"] == [["float32", 512]]
    with subtests.test("eager"):
        # An interpreter can't be saved; it neither finds Inductor's graphs nor leaves any.
        assert outcome(found[1]) == outcome(again[0]) == "uncached"
        assert found[1]["wire"] == [["float32", 512]]
    for i, name in enumerate(names):
        with subtests.test(name):
            first, second = found[2 + i], again[-2 - i]
            assert outcome(first) == "miss", "a graph that was compiled for something else was reused"
            assert outcome(second) == "hit"
            numel = 16 * OTHERS[name].get("out", 32)
            assert first["wire"] == second["wire"] == [[WIRE.get(name, "float32"), numel]]


def test_an_edited_pass_does_not_find_what_its_old_self_made(tmp_path):
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    shutil.copytree(ROOT / "gtp_compile", copy / "gtp_compile")
    for part in ("passes", "kernels"):
        shutil.copytree(ROOT / part, copy / "gtp_compile" / part)
    (cold,) = run(cache, [BASE], copy)
    assert cold["package"].startswith(str(copy))
    assert outcome(cold) == "miss"
    edited = copy / "gtp_compile" / "passes" / "retype_wgrads.py"
    edited.write_text(edited.read_text() + "\n# edited\n")
    first, second = run(cache, [BASE, BASE], copy)
    assert (outcome(first), outcome(second)) == ("miss", "hit")


def test_a_graph_without_placed_parameters_shares_inductors_entry(tmp_path):
    plain = {"sharded": False}
    (first,) = run(tmp_path, [{**plain, "backend": "inductor"}])
    second, third = run(tmp_path, [plain, {**plain, "options": {"disable": ["retype_wgrads"]}}])
    assert outcome(first) == "miss"
    # Our own options say nothing about such a graph, so they don't part it from Inductor's, either.
    assert (outcome(second), outcome(third)) == ("hit", "hit")
    assert second["wire"] == []
