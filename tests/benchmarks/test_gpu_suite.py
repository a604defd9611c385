"""The GPU suite's plan and its way with steps; the steps themselves are for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_results import write_results
from benchmarks.gpu_steps import STEPS, Step
from benchmarks.gpu_suite import Suite
from benchmarks.learner_step import utilisation

ROOT = Path(__file__).parents[2]


def step(name: str, code: str, *needs: str, minutes: float = 1.0, whole: bool = True) -> Step:
    return Step(name, minutes, lambda folder, server, left: [sys.executable, "-c", code], needs, is_whole=lambda: whole)


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


def test_steps_fail_alone_and_the_next_call_goes_on_with_what_has_not_succeeded(tmp_path: Path) -> None:
    steps = [
        step("good", "print('fine')"), step("bad", "raise SystemExit('no luck')"), step("after", "", "bad"),
        step("lacks", "", "no_such_package"), step("long", "", minutes=50.0), step("part", "", whole=False),
    ]
    first = Suite(steps, tmp_path, minutes=30)
    first.run()
    assert states(first) == {
        "good": "done", "bad": "failed", "after": "skipped", "lacks": "skipped", "long": "skipped", "part": "part",
    }
    assert first.outcomes["bad"].why == "no luck"
    assert first.outcomes["after"].why == "needs bad, which has not succeeded"
    assert "50 min" in first.outcomes["long"].why
    (tmp_path / "good.log").unlink()
    second = Suite([*steps[:1], step("bad", ""), step("after", "", "bad")], tmp_path, minutes=5)
    second.run()
    assert (states(second)["bad"], states(second)["after"]) == ("done", "done")
    assert not (tmp_path / "good.log").exists()


@pytest.mark.parametrize("dies_first", [False, True])
def test_no_process_outlives_a_step_not_even_one_with_a_session_of_its_own(tmp_path: Path, dies_first: bool) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
open({str(tmp_path / 'pid')!r}, "w").write(str(child.pid))
time.sleep({0 if dies_first else 100})
"""
    suite = Suite([step("leaves", code, minutes=1.0 if dies_first else 0.06)], tmp_path, minutes=5)
    suite.run()
    assert states(suite) == {"leaves": "done" if dies_first else "timeout"}
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_model_flops_count_what_is_not_padding_six_times_each_parameter() -> None:
    found = {
        "seconds": {"step": [2.0, 1.0, 4.0], "plain, rows": [8.0]}, "fill": {"packed": 0.5, "rows": 0.25},
        "fed_tokens": {"packed": 1000, "rows": 4000},
    }  # fmt: skip
    # 6 * 10 * 500 tokens in 2 s, and 6 * 10 * 1000 tokens in 8 s, of 60 000 a second
    assert utilisation(found, 10, 60_000.0) == {"step": 0.25, "plain, rows": 0.125}


def test_results_are_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state, out = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    (state / "measured.jsonl").write_text('{"what": "start", "dtype": "float32", "mean_abs": 1e-6, "p99_abs": 1e-5}\n')
    (state / "push-1b.json").write_text('{"rows": [{"transport": "cuda_ipc", "of_copy": 0.25}]}')
    (state / "learner-1b.json").write_text('{"mfu": {"step": 0.4}}')
    (state / "cut.json").write_text('{"mfu": ')
    (state / "parity.log").write_text("2 passed\n")
    for number in range(9):
        plot = tmp_path / "runs" / "sweep-gpu-sweep" / "plots" / f"{number}.png"
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_bytes(b"png")
    write_results(out, state, [{"step": "parity", "state": "done"}])
    assert len(list(out.iterdir())) == 8
    found = json.loads((out / "suite.json").read_text())
    assert found["push-1b"]["rows"][0]["of_copy"] == 0.25 and found["logprobs"][0]["what"] == "start"
    assert "cut" not in found and "2 passed" in (out / "suite.log").read_text()
    assert (out / "suite.png").stat().st_size > 5000
