"""A run that was interrupted or killed resumes from its checkpoint with the same result as without the break."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.pipeline import run
from async_rl.storage.checkpoints import checkpoint_folder, list_checkpoints, read_training_state
from async_rl.storage.log_ratios import FOLDER
from benchmarks.marked_command import MarkedCommand, wait_until
from learner.models.tiny_model import character_tokenizer

pytestmark = pytest.mark.e2e

Start = Callable[..., MarkedCommand]


def records(run_dir: Path) -> dict[int, dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {r["step"]: r for r in map(json.loads, lines) if "policy/loss" in r}


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
        f"run.dir={tmp_path}", f"run.name={name}", f"run.steps={steps}", "rollout.engine=hf", "eval.size=0",
        "algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.filter_zero_variance=false", *more,
    ]


def test_losses_after_a_resume_are_those_of_an_uninterrupted_run(smoke_yaml: Path, tmp_path: Path) -> None:
    whole = load_config(smoke_yaml, options(tmp_path, "whole", 6))
    run(whole)
    parted = load_config(smoke_yaml, options(tmp_path, "parted", 3))
    run(parted)
    resumed = options(tmp_path, "parted", 6, f"run.resume={parted.run_dir}", "placement.learner.ranks=2")
    summary = run(load_config(smoke_yaml, resumed))
    assert (summary["steps"], summary["resumes"]) == (6, 1)
    assert summary["buffer"]["buffer/trained"] == 6 * parted.learner.prompts_per_step
    expected, got = records(whole.run_dir), records(parted.run_dir)
    assert list(got) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, record in got.items():
        for key in ("policy/loss", "critic/loss", "policy/grad_norm", "reward/mean", "batch/response_tokens"):
            assert record[key] == pytest.approx(expected[step][key], abs=1e-4), (step, key)
    cut = read_training_state(checkpoint_folder(parted.run_dir, 6))
    assert (cut.lineage, cut.ranks) == (1, 2)
    assert cut.trained_groups == [[[0, 6 * parted.learner.prompts_per_step - 1]]]
    ratios = {path.name for path in (parted.run_dir / FOLDER).iterdir()}
    expected_files = {f"step_{step}.rank_0.npz" for step in range(1, 7)}
    assert ratios == expected_files | {f"step_{step}.rank_1.npz" for step in (4, 5, 6)}
    with pytest.raises(ConfigError, match=r"run\.steps must be above 6"):
        run(load_config(smoke_yaml, resumed))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_a_checkpoint_from_which_the_run_goes_on(
    smoke_yaml: Path, tmp_path: Path, start: Start, sign: signal.Signals
) -> None:
    run_dir = tmp_path / "stopped"
    asked = options(tmp_path, "stopped", 10000, "staleness.max=2", "checkpoint.every_steps=0")
    command = start("train", str(smoke_yaml), *asked)
    wait_until(lambda: len(records(run_dir)) > 2, 180, "two steps")
    command.process.send_signal(sign)
    assert command.wait(60) == 130
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")
    (version,) = list_checkpoints(run_dir)
    assert f"async-rl train --resume {run_dir}" in command.log.read_text()
    assert max(records(run_dir)) == version

    again = start("train", "--resume", str(run_dir), f"run.steps={version + 2}")
    assert again.wait(120) == 0, again.log.read_text()[-2000:]
    assert list(records(run_dir)) == list(range(1, version + 3))
    counters = json.loads((run_dir / "summary.json").read_text())["buffer"]
    assert counters["buffer/trained"] == 4 * (version + 2)
    assert counters["buffer/unaccounted"] == 0
    cut = read_training_state(checkpoint_folder(run_dir, version))
    assert sum(last - first + 1 for first, last in cut.trained_groups[0]) == 4 * version


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process(smoke_yaml: Path, tmp_path: Path, start: Start) -> None:
    command = start("train", str(smoke_yaml), *options(tmp_path, "twice", 10000))
    wait_until(lambda: len(records(tmp_path / "twice")) > 2, 180, "two steps")
    learner = next(p for p in command.processes() if "LearnerActor" in " ".join(p.cmdline()))
    learner.suspend()  # this step would never end
    command.interrupt()
    wait_until(lambda: "Again to end at once" in command.log.read_text(), 20, "the first one to be heard")
    command.interrupt()
    assert command.wait(30) == 130
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")


def test_a_run_whose_learner_was_killed_goes_on_from_its_last_checkpoint(
    smoke_yaml: Path, tmp_path: Path, start: Start
) -> None:
    run_dir = tmp_path / "killed"
    asked = options(tmp_path, "killed", 10000, "staleness.max=1", "checkpoint.every_steps=2")
    command = start("train", str(smoke_yaml), *asked)
    wait_until(lambda: len(list_checkpoints(run_dir)) > 1, 180, "two checkpoints")
    busy = start("train", "--resume", str(run_dir))
    assert busy.wait(60) == 2
    assert "still going on" in busy.log.read_text()
    next(p for p in command.processes() if "LearnerActor" in " ".join(p.cmdline())).send_signal(signal.SIGKILL)
    assert command.wait(60) == 1
    version = max(list_checkpoints(run_dir))
    before = contents(run_dir)
    other = Qwen2Config.from_pretrained(smoke_yaml.parent / "model", intermediate_size=192)
    Qwen2ForCausalLM(other).save_pretrained(tmp_path / "other")
    character_tokenizer().save_pretrained(tmp_path / "other")
    refused = start("train", "--resume", str(run_dir), f"model.path={tmp_path / 'other'}", f"run.steps={version + 2}")
    assert refused.wait(120) == 2
    assert "can't be loaded into the networks of this configuration" in refused.log.read_text()
    assert contents(run_dir) == before
    again = start("train", "--resume", str(run_dir), f"run.steps={version + 2}")
    assert again.wait(120) == 0, again.log.read_text()[-2000:]
    assert list(records(run_dir)) == list(range(1, version + 3))
    assert json.loads((run_dir / "summary.json").read_text())["buffer"]["buffer/trained"] == 4 * (version + 2)
