"""A run that was interrupted or killed resumes from its checkpoint with the same result as without the break."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import checkpoint_folder, list_checkpoints, read_training_state
from async_rl.base.run_dir.log_ratio_file import FOLDER
from async_rl.pipeline import run
from benchmarks.marked_command import MarkedCommand, wait_until
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import changed
from tests.kit.runs import logged
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.e2e

Start = Callable[..., MarkedCommand]


def records(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in logged(run_dir) if "policy/loss" in record}


def contents(run_dir: Path) -> dict[str, bytes]:
    """The run's files but for its logs, status, lock, and the journal's write-ahead log, which SQLite takes in.

    A checkpoint that the kill cut short (step_N.partial) is not counted either: a resume removes it.
    """
    found = [
        file for file in run_dir.rglob("*")
        if file.is_file() and "logs" not in file.parts and ".partial/" not in str(file)
    ]
    journal = [str(file) for file in found if file.name == "trajectories.sqlite"]
    others = {file for file in found if not file.name.startswith(("status.json", ".lock", "trajectories.sqlite"))}
    return {str(file): file.read_bytes() for file in others} | dict.fromkeys(journal, b"")


def options(tmp_path: Path, name: str, steps: int, *more: str) -> list[str]:
    return [
        f"run.dir={tmp_path}", f"run.name={name}", f"run.steps={steps}", "rollout.engine=hf", "eval.num_prompts=0",
        "algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.filter_zero_variance=false", *more,
    ]


@pytest.mark.nightly
def test_steps_that_a_killed_driver_had_not_logged_are_in_the_log_of_the_resumed_run(
    smoke_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options(tmp_path, "cut", 4, "checkpoint.every_steps=4")
    run(load_config(smoke_yaml, asked))
    run_dir = tmp_path / "cut"
    metrics = run_dir / "metrics.jsonl"
    whole = records(run_dir)
    of_two = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 2]
    metrics.write_text("".join(of_two))  # as if the driver had been killed before it logged the steps 3 and 4
    capsys.readouterr()
    resumed = load_config(smoke_yaml, [*asked, "run.steps=6", f"run.resume={run_dir}"])
    summary = run(resumed)
    assert "step 3 to 4" in capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "policy/loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    found = records(run_dir)
    for step in (3, 4):
        assert found[step].pop("log/restored") == 1.0
        for key in ("policy/loss", "reward/mean", "staleness/mean", "batch/episodes", "time/train_s", "push/bytes"):
            assert found[step][key] == whole[step][key], (step, key)
        assert "utilisation/learner" not in found[step]
        assert found[step]["time/written_at_s"] > found[2]["time/written_at_s"]
    assert summary["steps"] == 6
    with pytest.raises(ConfigError, match=r"^run\.steps "):
        run(resumed)

    (run_dir / "summary.json").unlink()  # as if the run had been killed after its last step, while its model was saved
    shutil.rmtree(run_dir / "model")
    found, ended = records(run_dir), run(changed(resumed, eval={"num_prompts": 4}))
    assert (ended["steps"], ended["resumes"], "ended" in ended) == (6, 2, False)
    same = ("reward_first", "reward_last", "reward_mean", "staleness_max", "utilisation/learner")
    assert {key: ended[key] for key in same} == {key: summary[key] for key in same}
    assert ended["buffer"]["buffer/trained"] == summary["buffer"]["buffer/trained"]
    assert ended["accuracy_end"] is not None
    assert records(run_dir) == found and (run_dir / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_losses_after_a_resume_are_those_of_an_uninterrupted_run(
    smoke_yaml: Path, tmp_path: Path, experts: bool
) -> None:
    """The run is resumed from an older checkpoint, with other numbers of learner ranks and of servers. Groups have
    supports, and with `experts` the routing of their tokens.
    """
    recorded = ["rollout.top_p=0.95"]
    if experts:
        recorded.append(f"model.path={save_moe(tmp_path / 'moe', num_experts=8, num_experts_per_tok=2)}")
    whole = load_config(smoke_yaml, options(tmp_path, "whole", 6, *recorded, "checkpoint.every_steps=3"))
    run_dir = whole.run_dir
    run(whole)
    expected = records(run_dir)
    from_step_3 = f"run.resume={checkpoint_folder(run_dir, 3)}"
    others = ("placement.learner.ranks=2", "placement.rollout.servers=2")
    resumed = load_config(smoke_yaml, options(tmp_path, "whole", 6, *recorded, from_step_3, *others))
    summary = run(resumed)
    assert (summary["steps"], summary["resumes"]) == (6, 1)
    assert summary["buffer"]["buffer/trained"] == 6 * whole.learner.prompts_per_step
    got = records(run_dir)
    assert list(got) == list(expected) == [1, 2, 3, 4, 5, 6]
    assert all(("version/rollout/1" in record) == (step > 3) for step, record in got.items())
    assert all(("routing/changed_fraction" in record) == experts for record in got.values())
    for step, record in got.items():
        for key in ("policy/loss", "critic/loss", "policy/grad_norm", "reward/mean", "batch/response_tokens"):
            assert record[key] == pytest.approx(expected[step][key], rel=1e-4, abs=1e-4), (step, key)
    state = read_training_state(checkpoint_folder(run_dir, 6))
    assert (state.lineage, state.ranks) == (1, 2)
    assert state.buffer["scalars"]["accounting"]["trained"] == 6 * whole.learner.prompts_per_step
    ratios = {path.name for path in (run_dir / FOLDER).iterdir()}
    expected_files = {f"step_{step}.rank_0.npz" for step in range(1, 7)}
    assert ratios == expected_files | {f"step_{step}.rank_1.npz" for step in (4, 5, 6)}


@pytest.mark.nightly
def test_a_resume_that_ends_before_its_first_step_leaves_the_summary_of_its_run(
    smoke_yaml: Path, tmp_path: Path, start: Start
) -> None:
    run(load_config(smoke_yaml, options(tmp_path, "whole", 1)))
    run_dir = tmp_path / "whole"
    summary = (run_dir / "summary.json").read_text()
    command = start("train", "--resume", str(run_dir), "run.steps=2", "learner.prompts_per_step=10000")
    wait_until(lambda: "waits for a batch" in (run_dir / "status.json").read_text(), 240, "the learner's wait")
    command.interrupt()
    assert command.wait(240) == 130, command.log.read_text()[-2000:]
    assert (run_dir / "summary.json").read_text() == summary


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_goes_on_after_ctrl_c_sigterm_and_the_death_of_its_driver(
    smoke_yaml: Path, tmp_path: Path, start: Start
) -> None:
    """Ctrl-C and SIGTERM end a run with a checkpoint. After SIGKILL it goes on from the last one that was due, without
    the metrics that the driver had not written yet. `--resume auto` starts it, goes on with it, and sees its end.
    """
    run_dir = tmp_path / "stopped"
    asked = options(tmp_path, "stopped", 10000, "staleness.max=2", "checkpoint.every_steps=0")
    command = start("train", str(smoke_yaml), *asked, "rollout.engine=sglang", "--resume", "auto")
    wait_until(lambda: len(records(run_dir)) > 2, 300, "two steps")
    assert len(command.processes()) > 5
    command.interrupt()
    assert_stopped(command, run_dir)
    (first,) = list_checkpoints(run_dir)

    command = start("train", "--resume", str(run_dir), "rollout.engine=hf")
    wait_until(lambda: max(records(run_dir)) > first + 1, 180, "two more steps")
    command.process.send_signal(signal.SIGTERM)
    assert_stopped(command, run_dir)
    second = max(list_checkpoints(run_dir))

    command = start("train", "--resume", str(run_dir), "checkpoint.every_steps=2")
    wait_until(lambda: max(list_checkpoints(run_dir)) > second, 180, "a checkpoint in mid-run")
    command.process.kill()
    wait_until(lambda: not command.processes(), 60, "every process of the run to end")
    version = max(list_checkpoints(run_dir))

    again = [str(smoke_yaml), *asked, "rollout.engine=hf", f"run.steps={version + 2}", "--resume", "auto"]
    command = start("train", *again)
    assert command.wait(120) == 0, command.log.read_text()[-2000:]
    command = start("train", *again)
    assert command.wait(60) == 0
    logged = records(run_dir)
    assert [*range(1, second + 1), version + 1, version + 2] == [*logged][:second] + [*logged][-2:]
    assert max(record["staleness/max"] for record in logged.values()) <= 2
    assert_every_group_was_trained_once(run_dir, version + 2)
    state = read_training_state(checkpoint_folder(run_dir, version))
    assert state.buffer["scalars"]["accounting"]["trained"] == 4 * version


def assert_stopped(command: MarkedCommand, run_dir: Path) -> None:
    """The run ends in order, with a checkpoint of its last step, and leaves no process behind."""
    assert command.wait(60) == 130, command.log.read_text()[-2000:]
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")
    assert max(records(run_dir)) == max(list_checkpoints(run_dir))
    assert f"async-rl train --resume {run_dir}" in command.log.read_text()


def assert_every_group_was_trained_once(run_dir: Path, steps: int) -> None:
    counters = json.loads((run_dir / "summary.json").read_text())["buffer"]
    assert counters["buffer/trained"] == 4 * steps
    assert counters["buffer/unaccounted"] == 0


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process(smoke_yaml: Path, tmp_path: Path, start: Start) -> None:
    command = start("train", str(smoke_yaml), *options(tmp_path, "twice", 10000))
    wait_until(lambda: len(records(tmp_path / "twice")) > 2, 180, "two steps")
    learner = command.wait_for("LearnerActor")[0]
    learner.suspend()  # this step would never end
    command.interrupt()
    wait_until(lambda: "Again to end at once" in command.log.read_text(), 60, "the first one to be heard")
    command.interrupt()
    assert command.wait(60) == 130
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")


@pytest.mark.nightly
def test_a_run_whose_learner_was_killed_goes_on_from_its_last_checkpoint(
    smoke_yaml: Path, tmp_path: Path, start: Start
) -> None:
    run_dir = tmp_path / "killed"
    asked = options(tmp_path, "killed", 10000, "staleness.max=1", "checkpoint.every_steps=2")
    command = start("train", str(smoke_yaml), *asked, "placement.learner.ranks=2", "learner.sequence_parallel=2")
    wait_until(lambda: len(list_checkpoints(run_dir)) > 1, 180, "two checkpoints")
    busy = start("train", "--resume", str(run_dir))
    assert busy.wait(60) == 2
    assert str(run_dir) in busy.log.read_text()
    command.wait_for("LearnerActor")[0].send_signal(signal.SIGKILL)
    assert command.wait(60) == 1
    assert command.orphans() == []
    text = command.log.read_text()
    assert re.search(r"async-rl: error: learner/\d on \S+ died", text) and re.search(r"\S+learner-\d\.log:\n +\S", text)
    assert "Traceback" not in text
    version = max(list_checkpoints(run_dir))
    before = contents(run_dir)
    other = Qwen2Config.from_pretrained(smoke_yaml.parent / "model", intermediate_size=192)
    Qwen2ForCausalLM(other).save_pretrained(tmp_path / "other")
    character_tokenizer().save_pretrained(tmp_path / "other")
    one_rank = ("placement.learner.ranks=1", "learner.sequence_parallel=1")
    resume = ("train", "--resume", str(run_dir), f"run.steps={version + 2}", *one_rank)
    refused = start(*resume, f"model.path={tmp_path / 'other'}")
    assert refused.wait(120) == 2
    assert "model.path must be" in refused.log.read_text()
    assert contents(run_dir) == before
    again = start(*resume)
    assert again.wait(120) == 0, again.log.read_text()[-2000:]
    assert list(records(run_dir)) == list(range(1, version + 3))
    assert max(record["staleness/max"] for record in records(run_dir).values()) <= 1
    assert_every_group_was_trained_once(run_dir, version + 2)
