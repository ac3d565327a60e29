"""The demo, end to end on two CPU ranks, and what it says when it can't go on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtp_compile.cli import main
from gtp_compile.demo_launch import RankFailed, Warned, launch

ROW = {
    "weights": list,
    "leader": str,
    "layout": str,
    "matched": bool,
    "reason": str,
    "gemm_dtype": str,
    "scratch_dtype": str,
    "wire_dtype": str,
    "main_grad_dtype": str,
    "wire_bytes": int,
    "error": float,
    "error_unretyped": float,
}


def demo(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "gtp_compile.cli", "demo", *args],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    """What a short demo prints, its JSON file, and the folder of graphs."""
    folder = tmp_path_factory.mktemp("demo")
    file, graphs = folder / "new" / "demo.json", folder / "graphs"
    done = demo("--ranks", "2", "--steps", "2", "--inner", "eager", "--json", str(file), "--graphs", str(graphs))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text()), graphs


@pytest.mark.dist
@pytest.mark.slow
class TestEndToEnd:
    def test_json_holds_the_run(self, run: tuple[str, dict, Path]) -> None:
        _, report, graphs = run
        assert report["model"] == "Qwen3MoeForCausalLM"
        assert (report["ranks"], report["steps"], report["inner"]) == (2, 2, "eager")
        assert len(report["loss"]) == len(report["twin_loss"]) == 2
        assert report["graphs"] == str(graphs)
        assert report["seconds"]["total"] > report["seconds"]["train"] > 0
        for row in report["groups"] + report["others"]:
            assert {key: type(row[key]) for key in ROW} == ROW, row["leader"]
            assert row["leader"] == row["weights"][0]

    def test_every_weight_has_one_row(self, run: tuple[str, dict, Path]) -> None:
        _, report, _ = run
        groups, others = ([w for r in report[kind] for w in r["weights"]] for kind in ("groups", "others"))
        assert len(groups + others) == len(set(groups + others)) == 25
        assert "model.layers.1.mlp.experts.gate_up_proj" in groups
        assert "lm_head.weight" in groups
        assert {"model.norm.weight", "model.embed_tokens.weight"} <= set(others)
        placed = {r["leader"]: r["layout"].split()[0] for r in report["groups"]}
        assert [name for name, layout in placed.items() if layout == "Shard(1)"] == [
            f"model.layers.{i}.mlp.experts.{w}" for i in range(2) for w in ("gate_up_proj", "down_proj")
        ]

    def test_gradients_are_right_only_with_retyping(self, run: tuple[str, dict, Path]) -> None:
        _, report, _ = run
        for row in report["groups"]:
            assert row["matched"], row["reason"]
            assert row["gemm_dtype"] == row["scratch_dtype"] == row["wire_dtype"] == row["main_grad_dtype"] == "float32"
            assert row["error"] <= 1e-6, row["leader"]
            assert row["error_unretyped"] > 1e-3, row["leader"]
        for row in report["others"]:
            assert row["wire_dtype"] == "float32"
            assert row["error"] <= 1e-6, row["leader"]

    def test_twin_starts_from_the_same_values(self, run: tuple[str, dict, Path]) -> None:
        _, report, _ = run
        assert report["loss"] == pytest.approx(report["twin_loss"], abs=0.01)
        assert report["loss"][1] < report["loss"][0]

    def test_few_steps_are_not_judged(self, run: tuple[str, dict, Path]) -> None:
        output, report, _ = run
        assert [c["passed"] for c in report["checks"]] == [None, None, True]
        assert output.count("not judged") == 2

    def test_a_person_sees_what_ran_and_where_it_went(self, run: tuple[str, dict, Path]) -> None:
        output, _, graphs = run
        for words in ("2 x CPU", "gloo", "step 1/2", "step 2/2", "retype_wgrads", str(graphs), "demo.json"):
            assert words in output
        assert "\x1b" not in output  # not a terminal
        assert list(graphs.glob("graph_*/*_retype_wgrads.diff"))


class TestArguments:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ([], "COMMAND"),
            (["demo", "--ranks", "0"], "--ranks: a whole number of at least 1 is expected, got '0'"),
            (["demo", "--steps", "-3"], "--steps: a whole number of at least 1 is expected, got '-3'"),
            (["demo", "--steps", "many"], "--steps: a whole number of at least 1 is expected, got 'many'"),
            (["demo", "--inner", "triton"], "'inductor', 'eager'"),
            (["demo", "--gpus", "2"], "--gpus"),
        ],
    )
    def test_refuses(self, args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert end.value.code == 2
        assert message.replace("'", "") in capsys.readouterr().err.replace("'", "")

    def test_refuses_ranks_that_do_not_divide(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--ranks", "3", "--graphs", str(tmp_path)]) == 2
        assert (
            "--ranks: 3 ranks can't share the model's weights evenly; choose one of 1, 2, 4" in capsys.readouterr().err
        )

    @pytest.mark.parametrize("option", ["--json", "--graphs"])
    def test_refuses_what_it_cannot_write(
        self, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        assert main(["demo", option, "file/below"]) == 2
        assert "can't write file" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["rich", "transformers"])
    def test_names_the_extra(
        self, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("gtp_compile.cli.find_spec", lambda n: None if n == name else object())
        with pytest.raises(SystemExit) as end:
            main(["demo"])
        assert end.value.code == 2
        assert f"needs {name}; pip install 'gtp-compile[demo]'" in capsys.readouterr().err


class TestChecks:
    def checks(self, loss: list[float], twin: list[float], *errors: float | None) -> list[bool | None]:
        from gtp_compile.demo import check

        groups = [{"error": e} for e in errors]
        return [c.passed for c in check({"loss": loss, "twin_loss": twin, "groups": groups}, "cpu")]

    def test_pass(self) -> None:
        assert self.checks([5.0] * 29 + [4.5], [5.05] * 29 + [4.5], 1e-7) == [True, True, True]

    def test_loss_that_does_not_fall(self) -> None:
        assert self.checks([5.0] * 30, [5.0] * 30, 1e-7) == [False, True, True]

    def test_loss_that_is_no_number(self) -> None:
        assert self.checks([5.0] * 29 + [float("nan")], [5.0] * 30, 1e-7)[:2] == [False, False]

    def test_twin_far_away_at_one_step(self) -> None:
        assert self.checks([5.0] * 29 + [4.0], [5.0] * 3 + [5.06] + [5.0] * 25 + [4.0], 1e-7)[1] is False

    @pytest.mark.parametrize("errors", [(), (1e-7, 2e-6), (1e-7, None), (1e-7, float("nan"))])
    def test_gradient_errors(self, errors: tuple[float | None, ...]) -> None:
        assert self.checks([5.0, 4.0], [5.0, 4.0], *errors) == [None, None, False]


def worker(rank: int, what: str, store: str, send) -> None:
    """Stands in for the demo's ranks."""
    import warnings

    send((rank, os.getpid()))
    if what == "warn":
        warnings.warn("rounded", RuntimeWarning, stacklevel=1)
    elif rank == 0 and what == "raise":
        raise ValueError("a weight is missing")
    elif rank == 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and what == "exit":
        os._exit(7)
    if what in ("raise", "kill", "exit", "wait"):
        time.sleep(120)  # as in a collective that never completes


@pytest.mark.dist
class TestLaunch:
    def messages(self, what: str) -> list:
        with contextlib.closing(launch(worker, 2, what)) as messages:
            return list(messages)

    def test_messages_and_warnings_arrive(self) -> None:
        got = self.messages("warn")
        assert sorted(m[0] for m in got if isinstance(m, tuple)) == [0, 1]
        assert Warned(0, "RuntimeWarning: rounded") in got

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("raise", r"rank 0 of 2 failed:\n(.*\n)+ValueError: a weight is missing"),
            ("kill", r"rank 1 of 2 failed:\nit was ended by signal 9 \(SIGKILL\)"),
            ("exit", r"rank 1 of 2 failed:\nit ended with exit code 7"),
        ],
    )
    def test_one_failure_ends_all(self, what: str, message: str) -> None:
        start = time.monotonic()
        with pytest.raises(RankFailed, match=message):
            self.messages(what)
        assert time.monotonic() - start < 60

    def test_ctrl_c_leaves_nothing(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import contextlib\nfrom gtp_compile.demo_launch import launch\nfrom test_demo import worker\n"
            "if __name__ == '__main__':\n    with contextlib.closing(launch(worker, 2, 'wait')) as messages:\n"
            "        for _, pid in messages:\n            print(pid, flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=60)
        assert errors.count("Traceback") == 1, errors  # the script's own
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
