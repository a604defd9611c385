"""The GPU suite: order, skipped and failed steps, results. The steps themselves need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_rl.sweeps.tables import write_page
from benchmarks.gpu_steps import STEPS, SWEEP, SuiteStep
from benchmarks.gpu_suite import PLOTS, Suite, write_results
from benchmarks.learner_step import utilisation

ROOT = Path(__file__).parents[2]


def step(name: str, code: str, *needs: str, minutes: float = 1.0, continues: bool = False) -> SuiteStep:
    return SuiteStep(name, minutes, lambda folder, server, left: [sys.executable, "-c", code], needs, continues)


def states(suite: Suite) -> dict[str, str]:
    return {outcome.step: outcome.state for outcome in suite.outcomes.values()}


def test_the_script_says_what_would_run_and_what_has_no_time() -> None:
    def listed(minutes: str) -> list[str]:
        done = subprocess.run(
            ["bash", "scripts/gpu_suite.sh", minutes, "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={**os.environ, "ASYNC_RL_PYTHON": sys.executable},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    names = [line.split()[0] for line in listed("60")]
    assert names == [s.name for s in STEPS]
    assert not any("no time left" in line for line in listed("60"))
    assert all("done before" in line or "no time left" in line for line in listed("0.1"))


def test_every_step_names_what_exists(tmp_path: Path) -> None:
    for s in STEPS:
        command = s.command(tmp_path, {"attention-backend": "triton"}, 10.0)
        files = [word for word in command if word.endswith((".py", ".yaml"))]
        assert all((ROOT / file).is_file() for file in files), command
        assert command[:2] == [sys.executable, "-m"] and all(command)
    assert sum(s.minutes for s in STEPS) < 60


@pytest.mark.processes
def test_steps_fail_alone_and_the_next_call_goes_on_with_what_has_not_succeeded(tmp_path: Path) -> None:
    steps = [
        step("good", "print('fine')"), step("bad", "raise SystemExit('no luck')"), step("after", "", "bad"),
        step("lacks", "", "no_such_package"), step("long", "", minutes=50.0), step("goes on", "", continues=True),
    ]
    first = Suite(steps, tmp_path, minutes=30)
    first.run()
    assert states(first) == {
        "good": "done", "bad": "failed", "after": "skipped", "lacks": "skipped", "long": "skipped", "goes on": "done",
    }
    assert first.outcomes["bad"].why == "no luck"
    assert first.outcomes["after"].why == "needs bad, which has not succeeded"
    assert "50 min" in first.outcomes["long"].why
    for name in ("good", "goes on"):
        (tmp_path / f"{name}.log").unlink()
    second = Suite([steps[0], step("bad", ""), step("after", "", "bad"), steps[-1]], tmp_path, minutes=5)
    second.run()
    assert (states(second)["bad"], states(second)["after"]) == ("done", "done")
    assert not (tmp_path / "good.log").exists()
    assert (tmp_path / "goes on.log").exists()


@pytest.mark.processes
@pytest.mark.parametrize("dies_first", [False, True])
def test_no_process_outlives_a_step_not_even_one_with_a_session_of_its_own(tmp_path: Path, dies_first: bool) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
open({str(tmp_path / 'pid')!r}, "w").write(str(child.pid))
time.sleep({0 if dies_first else 100})
"""
    suite = Suite([step("leaves", code, minutes=1.0 if dies_first else 0.03)], tmp_path, minutes=5)
    suite.run()
    assert states(suite) == {"leaves": "done" if dies_first else "timeout"}
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_model_flops_count_what_is_not_padding_six_times_each_parameter() -> None:
    found = {"seconds": {"step": [2.0, 1.0, 4.0], "plain": [8.0]}, "real_tokens": 500}
    # 6 * 10 * 500 FLOP in 2 s and in 8 s, of 60 000 a second
    assert utilisation(found, 10, 60_000.0) == {"step": 0.25, "plain": 0.0625}


def test_a_dot_in_the_name_of_a_result_is_kept(tmp_path: Path) -> None:
    write_page(tmp_path / "learner-0.1b", "# page", {"ratio": 0.9})
    assert {file.name for file in tmp_path.iterdir()} == {"learner-0.1b.md", "learner-0.1b.json"}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes files as steps leave them in the current folder; returns the folder of the suite."""
    monkeypatch.chdir(tmp_path)
    state = Path("runs/gpu-suite")
    written = {
        state / "measured.jsonl": '{"what": "start", "dtype": "float32", "mean_abs": 1e-6, "p99_abs": 1e-5}\n',
        state / "push-1b.json": '{"rows": [{"transport": "cuda_ipc", "of_plain": 0.25}]}',
        state / "learner-0.1b.json": '{"mfu": {"step": 0.4}}',
        state / "cut.json": '{"mfu": ',
        state / "parity.log": "2 passed\n",
        state / "push-1b-server" / "sglang-rollout-0.log": "the server's last words\n",
        SWEEP / "sweep.json": "{}",
        SWEEP / "cells" / "staleness-1" / "cell.json": '{"seconds": 150}',
        SWEEP / "cells" / "staleness-1" / "model" / "model.safetensors": "weights",
    }
    written |= {SWEEP / "plots" / f"{name}.png": "png" for name in (*PLOTS, "drops", "offpolicy", "reward_by_step")}
    for file, text in written.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return state


def test_results_are_few_files_the_telling_ones(found: Path) -> None:
    out = found / "out"
    for _ in range(2):  # the second time, the first one's log is not taken for a step's
        write_results(out, found, [{"step": "parity", "state": "done"}])
    plots = [f"sweep-{name}.png" for name in ("accuracy_by_time", "staleness", "trade_off", "utilisation")]
    assert sorted(file.name for file in out.iterdir()) == sorted(
        ["suite.json", "suite.log", "sweep-cells.tar.gz", *plots]
    )
    written = json.loads((out / "suite.json").read_text())
    assert written["push-1b"]["rows"][0]["of_plain"] == 0.25 and written["logprobs"][0]["what"] == "start"
    assert "cut" not in written
    log = (out / "suite.log").read_text()
    assert log.count("2 passed") == 1 and "==== push-1b-server/sglang-rollout-0\nthe server's last words" in log


def test_a_step_may_need_a_file_of_a_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise OSError('no GPU here')")
    (tmp_path / "kernels" / "fast_ops.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    suite = Suite([], tmp_path, minutes=5)
    obstacles = [suite.obstacle(step("any", "", need)) for need in ("kernels", "kernels/fast_ops", "kernels/slow_ops")]
    assert obstacles == ["", "", "needs kernels/slow_ops, which is not installed"]


def test_every_test_for_gpus_is_in_a_step() -> None:
    commands = [" ".join(s.command(Path("results"), {}, 10.0)) for s in STEPS]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "gpu" in file.read_text()]
    assert len(files) >= 5
    for file in files:
        assert any(str(file.relative_to(ROOT)) in command for command in commands), file
