"""The watcher of a real run rolls back, stops at the best version, pauses until it is answered, and outlives kills."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.config.section import section
from async_rl.base.run_dir.watch_events import read_events
from async_rl.base.telemetry.status import format_status
from benchmarks.marked_command import MarkedCommand, wait_until
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward
from tests.kit.runs import logged

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "async_rl.cli"]
Start = Callable[..., MarkedCommand]


@section("task.rewards.params")
class SwitchSettings:
    """The settings of SWITCHED."""

    file: str = ""
    """While this file exists, no answer gets a reward."""


def switched(question: Question, response: str, settings: SwitchSettings) -> float:
    """A reward of 1, with a little that depends on the answer, and of 0 while a file exists."""
    return (0.0 if Path(settings.file).exists() else 1.0) + 0.1 * (len(response) % 2)


SWITCHED = Reward(function=switched, settings=SwitchSettings)


def watched(folder: Path, action: str, *more: str) -> list[str]:
    """Settings of a run whose rewards fall to nothing while folder/fallen exists."""
    rewards = [{"reward": "tests.e2e.test_watcher:SWITCHED", "params": {"file": str(folder / "fallen")}}]
    return [
        f"run.dir={folder}", "run.name=watched", "run.steps=1000", "rollout.engine=hf", "eval.num_prompts=0",
        "algorithm.kl.kind=k2_loss", "algorithm.kl.coef=0.01", "algorithm.entropy_coef=0.1",
        "checkpoint.every_steps=1", "checkpoint.keep_last=1", "staleness.max=0", "learner.warmup_steps=0",
        "learner.lr_decay_fraction=0", f"task.rewards={json.dumps(rewards)}", f"watch.action={action}",
        "watch.rules.reference_kl=off", "watch.rules.diversity=off", *more,
    ]  # fmt: skip


def fall_after_steps(run_dir: Path, command: MarkedCommand) -> Path:
    """Wait until the run has made some steps, and take all rewards away; returns the file that does it."""
    file = run_dir.parent / "fallen"
    wait_until(lambda: len(logged(run_dir)) > 6 or command.process.poll() is not None, 200, "six steps")
    file.touch()
    return file


def kinds(run_dir: Path) -> list[str]:
    return [event.kind for event in read_events(run_dir)]


def settings_by_step(run_dir: Path, key: str) -> dict[int, float]:
    """A setting that the learner has used, by step: the KL coefficient or the learning rate."""
    return {int(record["step"]): record[key] for record in logged(run_dir) if key in record}


def assert_all_trained_groups_are_kept(run_dir: Path) -> None:
    """Each step of each lineage has its four groups, with their answers, in the journal of that lineage."""
    for metrics in run_dir.glob("metrics*.jsonl"):
        journal = run_dir / metrics.name.replace("metrics", "trajectories").replace(".jsonl", ".sqlite")
        steps = {json.loads(line)["step"] for line in metrics.read_text().splitlines() if "reward/mean" in line}
        with closing(sqlite3.connect(journal)) as database:
            found = dict(database.execute("SELECT step, COUNT(DISTINCT group_id) FROM trained GROUP BY step"))
        assert steps and {step: found.get(step) for step in steps} == dict.fromkeys(steps, 4), metrics


@pytest.mark.parametrize("answer", ["go-on", "rollback", "stop"])
def test_a_paused_run_goes_on_goes_back_or_ends_when_a_person_says_so(
    smoke_yaml: Path, tmp_path: Path, start: Start, answer: str
) -> None:
    run_dir = tmp_path / "watched"
    command = start("train", str(smoke_yaml), *watched(tmp_path, "pause", "run.steps=40"))
    file = fall_after_steps(run_dir, command)
    wait_until(lambda: "paused by the watcher since step" in format_status(run_dir), 60, "the run to pause")
    file.unlink()
    subprocess.run([*COMMAND, "answer", str(run_dir), answer], check=True)
    assert command.wait(200) == 0, command.text()[-3000:]
    pause, act, *more = read_events(run_dir)
    assert (pause.kind, act.kind, act.rules) == ("pause", answer, ("reward",))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (run_dir / "model" / "config.json").is_file()
    if answer == "stop":
        assert [event.kind for event in more] == ["ended"]
        assert summary["model_version"] == act.back_to and summary["resumes"] == 0
        assert summary["steps"] < 40
    elif answer == "go-on":
        assert not more and (summary["steps"], summary["resumes"]) == (40, 0)
    else:
        assert [event.kind for event in more] == ["resumed"] and (summary["steps"], summary["resumes"]) == (40, 1)
        coefficients = settings_by_step(run_dir, "kl/coef")
        assert coefficients == {step: 0.02 if step > act.back_to else 0.01 for step in range(1, 41)}
    assert_all_trained_groups_are_kept(run_dir)


KILLED_WHEN = {
    "it is decided": lambda run_dir: "rollback" in kinds(run_dir),
    "it is under way": lambda run_dir: (run_dir / "config.lineage_0.yaml").exists(),
    "it is over": lambda run_dir: "resumed" in kinds(run_dir) and len(logged(run_dir)) > 8,
}
"""The moments of a rollback at which a process is killed."""


@pytest.mark.parametrize(
    ("victim", "moment"),
    [("driver", "it is decided"), ("learner", "it is under way"), ("driver", "it is over")],
)  # fmt: skip
def test_a_rollback_outlives_a_kill_with_what_it_changed_and_every_trained_group(
    smoke_yaml: Path, tmp_path: Path, start: Start, victim: str, moment: str
) -> None:
    run_dir = tmp_path / "watched"
    command = start("train", str(smoke_yaml), *watched(tmp_path, "rollback"))
    file = fall_after_steps(run_dir, command)
    wait_until(lambda: "rollback" in kinds(run_dir), 60, "the watcher to go back")
    file.unlink()
    wait_until(lambda: KILLED_WHEN[moment](run_dir), 200, f"the rollback: {moment}")
    kill(command, victim)
    assert command.wait(100) == (1 if victim == "learner" else -signal.SIGKILL) and not command.orphans()
    was_over = "resumed" in kinds(run_dir)
    assert was_over == (moment == "it is over")
    back_to = read_events(run_dir)[0].back_to

    steps = max(back_to, len(logged(run_dir))) + 12
    again = start("train", "--resume", str(run_dir), f"run.steps={steps}")
    assert again.wait(200) == 0, again.text()[-3000:]
    assert kinds(run_dir) == ["rollback", "resumed"]
    assert load_config(run_dir / "config.yaml").watch.rollbacks == 1
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    for key, before, after in (("kl/coef", 0.01, 0.02), ("policy/lr", 1e-3, 5e-4)):
        found = settings_by_step(run_dir, key)
        assert found == pytest.approx({step: after if step > back_to else before for step in range(1, steps + 1)})
    assert_all_trained_groups_are_kept(run_dir)


def kill(command: MarkedCommand, victim: str) -> None:
    if victim == "driver":
        command.process.send_signal(signal.SIGKILL)
    else:  # a resumed run starts its processes again
        command.wait_for("ray::LearnerActor", timeout_s=200)[0].send_signal(signal.SIGKILL)
