"""The guard of a real run goes back, stops at the best version, pauses until it is answered, and outlives kills."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.config.section import section
from async_rl.pipeline import run
from async_rl.storage.checkpoints import checkpoint_folder, list_checkpoints
from async_rl.storage.guard_events import open_pause, read_guard_events
from async_rl.telemetry.status import format_status
from benchmarks.marked_command import MarkedCommand, wait_until
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, Score
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "async_rl.cli"]
Start = Callable[..., MarkedCommand]


def guarded(folder: Path, action: str, *more: str) -> list[str]:
    """Settings by which trouble is found at version 2: two kinds of signals are beyond limits that are near 0.

    The entropy moves the policy, whose answers are all wrong, and most of them are cut off.
    """
    return [
        f"run.dir={folder}", "run.name=guarded", "run.steps=5", "rollout.engine=hf", "eval.size=0",
        "algorithm.kl.kind=k2_loss", "algorithm.kl.coef=0.01", "algorithm.entropy_coef=0.1",
        "checkpoint.every_steps=1", "checkpoint.keep_last=1",
        f"guard.action={action}", "guard.every_steps=1", "guard.kl_per_token_limit=1e-9", "guard.cut_limit=1e-3", *more,
    ]  # fmt: skip


def groups_trained(journal: Path) -> int:
    with sqlite3.connect(journal) as database:
        (count,) = database.execute("select count(*) from uses").fetchone()
        return int(count)


@pytest.mark.nightly
def test_a_run_goes_back_with_a_higher_kl_coefficient_and_then_stops_at_the_best(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    summary = run(load_config(smoke_yaml, guarded(tmp_path, "rollback", "guard.max_rollbacks=1")))
    run_dir = tmp_path / "guarded"
    events = read_guard_events(run_dir)
    assert [(event.kind, event.version, event.back_to) for event in events] == [
        ("rollback", 2, 1), ("resumed", 2, 1), ("stop", 2, 1)
    ]
    assert set(events[0].signals) == {"cut", "kl_per_token"}
    assert summary["model_version"] == 1 and summary["resumes"] == 1 and "model of version 1" in summary["ended"]
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    coefficients = {record["step"]: record["kl/coef"] for record in logged(run_dir) if "kl/coef" in record}
    assert coefficients[1] == 0.01 and coefficients[2] == 0.02
    discarded = [json.loads(line) for line in (run_dir / "metrics.lineage_0.jsonl").read_text().splitlines()]
    assert min(record["step"] for record in discarded) == 2
    assert groups_trained(run_dir / "trajectories.lineage_0.sqlite") >= 8  # those of step 2 as well, 4 a step
    assert (run_dir / "model" / "config.json").is_file()
    assert 1 in list_checkpoints(run_dir), "keep_last alone would have removed it"


@pytest.mark.nightly
def test_a_paused_run_stands_until_it_is_answered_also_after_a_resume(
    smoke_yaml: Path, tmp_path: Path, start: Start
) -> None:
    run_dir = tmp_path / "guarded"
    options = guarded(tmp_path, "pause", "timeouts.pause_s=5")
    first = subprocess.run([*COMMAND, "train", str(smoke_yaml), *options], capture_output=True, text=True, timeout=200)
    assert first.returncode == 0, first.stderr
    assert "waited 5 s (timeouts.pause_s)" in json.loads((run_dir / "summary.json").read_text())["ended"]
    assert open_pause(run_dir)
    again = start("train", "--resume", str(run_dir), "timeouts.pause_s=200")
    wait_until(lambda: "paused by the guard since step 2" in format_status(run_dir), 120, "the run to pause")
    assert "is paused by the guard" in format_status(run_dir)
    shown = subprocess.run([*COMMAND, "guard", str(run_dir)], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("step 2: pause: ") and "--go-on | --rollback | --stop" in shown
    subprocess.run([*COMMAND, "guard", str(run_dir), "--go-on"], check=True)
    assert again.wait(200) == 0
    assert [event.kind for event in read_guard_events(run_dir)] == ["pause", "go_on"]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 5


@asynccontextmanager
async def open_gold(config: Config, settings: None) -> AsyncIterator[Score]:
    """Open a gold reward that is 1, and 0 in the evaluation after the last step, when that step has its checkpoint."""
    last = checkpoint_folder(config.run_dir, config.run.steps)
    yield lambda question, response: float(not last.exists())


FALLS_AT_END = Reward(open=open_gold)


@pytest.mark.nightly
def test_trouble_in_the_last_evaluation_takes_the_run_back_or_ends_it(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    options = guarded(
        tmp_path, "rollback", "guard.max_rollbacks=1", "guard.kl_per_token_limit=.inf", "guard.cut_limit=.inf",
        "eval.size=8", "eval.every_steps=1", "eval.pin_version=true",
        "eval.gold_reward=tests.e2e.test_guard:FALLS_AT_END",
    )  # fmt: skip
    summary = run(load_config(smoke_yaml, options))
    events = read_guard_events(tmp_path / "guarded")
    assert [(event.kind, event.version, event.back_to, event.signals) for event in events] == [
        (kind, 5, 1, ("gold_fall",)) for kind in ("rollback", "resumed", "stop")
    ]
    assert (summary["steps"], summary["resumes"], summary["model_version"]) == (5, 1, 1)
    assert (tmp_path / "guarded" / "model" / "config.json").is_file()


@section("task.rewards.params")
class SwitchSettings:
    """The settings of SWITCHED."""

    file: str = ""
    """While this file exists, all answers get a far higher reward."""


def switched(question: Question, response: str, settings: SwitchSettings) -> float:
    """A reward that is hacked while a file exists, with a little that depends on the answer."""
    return 10.0 * Path(settings.file).exists() + 0.1 * (len(response) % 2)


SWITCHED = Reward(function=switched, settings=SwitchSettings)


def hackable(folder: Path, action: str, *more: str) -> list[str]:
    """Settings by which there is trouble while the file folder/hacked exists: the reward is far above its start, and
    the KL is not 0. The version to go back to is that of three steps before.
    """
    rewards = [{"reward": "tests.e2e.test_guard:SWITCHED", "params": {"file": str(folder / "hacked")}}]
    return [
        *guarded(folder, action), f"task.rewards={json.dumps(rewards)}", "guard.cut_limit=.inf", "run.steps=1000",
        "staleness.max=0", "learner.warmup_steps=0", "learner.decay_fraction=0", *more,
    ]  # fmt: skip


def hack_after_steps(run_dir: Path, command: MarkedCommand) -> Path:
    """Wait until the run has made some steps, and have its answers rewarded; returns the file that does it."""
    file = run_dir.parent / "hacked"
    wait_until(lambda: len(logged(run_dir)) > 6 or command.process.poll() is not None, 200, "six steps")
    file.touch()
    return file


def kinds(run_dir: Path) -> list[str]:
    return [event.kind for event in read_guard_events(run_dir)]


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


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("answer", ["rollback", "stop"])
def test_a_paused_run_goes_back_or_ends_when_the_user_says_so(
    smoke_yaml: Path, tmp_path: Path, start: Start, answer: str
) -> None:
    run_dir = tmp_path / "guarded"
    command = start("train", str(smoke_yaml), *hackable(tmp_path, "pause", "run.steps=40"))
    file = hack_after_steps(run_dir, command)
    wait_until(lambda: "paused by the guard since step" in format_status(run_dir), 60, "the run to pause")
    file.unlink()
    steps = len(logged(run_dir))
    said = subprocess.run([*COMMAND, "guard", str(run_dir), f"--{answer}"], capture_output=True, text=True, check=True)
    assert "has the answer" in said.stdout
    assert command.wait(200) == 0, command.text()[-3000:]
    pause, act, *more = read_guard_events(run_dir)
    assert (pause.kind, act.kind, act.signals) == ("pause", answer, ("kl_per_token", "proxy"))
    assert act.back_to == pause.version - 3
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (run_dir / "model" / "config.json").is_file()
    if answer == "stop":
        assert not more and summary["model_version"] == act.back_to and summary["resumes"] == 0
        assert "the guard ended the run at step" in summary["ended"] and steps <= summary["steps"] < 40
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
TIGHTENED = {"kl": ("kl/coef", 0.01, 0.02), "lr": ("policy/lr", 1e-3, 5e-4)}
"""The metric of what a rollback changes, its value before that, and after."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "moment", "tighten"),
    [
        ("driver", "it is decided", "kl"), ("driver", "it is under way", "lr"), ("learner", "it is under way", "kl"),
        ("learner", "it is over", "lr"), ("driver", "it is over", "kl"),
    ],
)  # fmt: skip
def test_a_rollback_outlives_a_kill_with_what_it_changed_and_every_trained_group(
    smoke_yaml: Path, tmp_path: Path, start: Start, victim: str, moment: str, tighten: str
) -> None:
    run_dir = tmp_path / "guarded"
    command = start("train", str(smoke_yaml), *hackable(tmp_path, "rollback", f"guard.tighten={tighten}"))
    file = hack_after_steps(run_dir, command)
    wait_until(lambda: "rollback" in kinds(run_dir), 60, "the guard to go back")
    file.unlink()
    wait_until(lambda: KILLED_WHEN[moment](run_dir), 200, f"the rollback: {moment}")
    kill(command, victim)
    assert command.wait(100) == (1 if victim == "learner" else -signal.SIGKILL) and not command.orphans()
    was_over = "resumed" in kinds(run_dir)
    assert was_over == (moment == "it is over")
    back_to = read_guard_events(run_dir)[0].back_to

    steps = max(back_to, len(logged(run_dir))) + 12
    again = start("train", "--resume", str(run_dir), f"run.steps={steps}")
    assert again.wait(200) == 0, again.text()[-3000:]
    assert kinds(run_dir) == ["rollback", "resumed"]
    assert load_config(run_dir / "config.yaml").guard.rollbacks == 1
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    key, before, after = TIGHTENED[tighten]
    found = settings_by_step(run_dir, key)
    assert found == pytest.approx({step: after if step > back_to else before for step in range(1, steps + 1)})
    assert_all_trained_groups_are_kept(run_dir)


def kill(command: MarkedCommand, victim: str) -> None:
    if victim == "driver":
        command.process.send_signal(signal.SIGKILL)
    else:  # a resumed run starts its processes again
        command.wait_for("ray::LearnerActor", timeout_s=200)[0].send_signal(signal.SIGKILL)
