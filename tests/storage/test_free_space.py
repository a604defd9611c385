"""Free disk space is checked before a run, and a full disk is one clear error."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from async_rl import pipeline
from async_rl.cli import main
from async_rl.config import (
    Config,
)
from async_rl.config.guard import GuardConfig
from async_rl.config.outputs import CheckpointConfig
from async_rl.errors import ConfigError
from async_rl.guard.decision import Guard
from async_rl.storage import free_space as disk
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, to_remove, write_training_state
from async_rl.storage.free_space import full_disk_named
from async_rl.storage.run_dir import new_run_dir
from learner.memory.optimizer_state import checkpoint_bytes
from tests.kit.configs import changed, make_config
from tests.kit.models import save_tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model("tiny-qwen2", folder, seed=0)
    return folder


def check(config: Config) -> None:
    disk.check_disk(config, checkpoint_bytes(config))


def needed_bytes(config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """The least free space that `check_disk` accepts, found by bisection."""
    refused, accepted, of_checkpoint = 0, 2**40, checkpoint_bytes(config)
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path, free=middle: SimpleNamespace(free=free))
        try:
            disk.check_disk(config, of_checkpoint)
        except ConfigError:
            refused = middle
        else:
            accepted = middle
    return accepted


def test_the_needed_space_counts_the_result_and_all_checkpoints_at_once(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(good / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in weights.values())
    model_bytes = (good / "model.safetensors").stat().st_size
    fixed = 2**30 + 3 * model_bytes  # the result, and two folders if auto becomes disk

    def checkpoints(steps: int = 100, advantage: str = "grpo", **checkpoint: int) -> float:
        """In parameters, of 12 bytes each."""
        config = make_config(
            good, run={"dir": tmp_path, "steps": steps}, checkpoint=checkpoint, algorithm={"advantage": advantage}
        )
        return (needed_bytes(config, monkeypatch) - fixed) / 12

    assert checkpoints(every_steps=10) == 3 * parameters  # keep_last 2, and the one that is being written
    assert checkpoints(every_steps=10, keep_last=4) == 5 * parameters
    assert checkpoints(every_steps=60) == 2 * parameters  # of steps 60 and 100
    assert checkpoints(every_steps=0) == 0
    assert checkpoints(every_steps=100, advantage="gae") == 2 * parameters  # policy and critic
    sgd = make_config(good, run={"dir": tmp_path}, checkpoint={"every_steps": 10}, learner={"optimizer": "SGD"})
    assert needed_bytes(sgd, monkeypatch) - fixed == 3 * 4 * parameters
    lora = make_config(good, run={"dir": tmp_path}, model={"lora": {"rank": 1}})
    adapters = (needed_bytes(lora, monkeypatch) - fixed) / 12
    assert adapters == sum(sum(tensor.shape) for tensor in weights.values() if tensor.ndim == 2) < parameters / 4
    needed = {
        name: needed_bytes(make_config(good, run={"dir": tmp_path}, weight_sync={"transport": name}), monkeypatch)
        for name in ("auto", "disk", "gloo")
    }
    assert needed["auto"] == needed["disk"] == needed["gloo"] + 2 * model_bytes


KEPT = 3
"""keep_last 2, and the one that is being written."""


def most_on_disk(windows: int, evaluations: int, has_gold: bool) -> int:
    """The most checkpoints that a run with a guard has at one time, of one each five steps."""
    guard, on_disk, most = Guard(GuardConfig(every_steps=windows)), set[int](), 0
    for version in range(1, 1001):
        values = {"batch/episodes": 64.0, "reward/mean": 0.0}
        if has_gold and version % evaluations == 0:
            gold = 1.0 if version <= 3 * evaluations else 0.0
            values |= {"eval/gold": gold, "eval/gold_squared": gold + 1.0, "eval/gold_labels": 64.0}
        guard.add(version, values)
        if version % 5 == 0:
            on_disk.add(version)
            most = max(most, len(on_disk))
            needed = {max((each for each in on_disk if each <= wanted), default=0) for wanted in guard.needed()}
            on_disk -= set(to_remove(sorted(on_disk), CheckpointConfig(), {})) - needed
    return most


def test_the_checkpoints_to_which_guard_and_alarms_may_go_back_are_counted(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checkpoints(**sections: Any) -> float:
        run = {"dir": tmp_path, "steps": 1000}
        config = make_config(good, run=run, checkpoint={"every_steps": 5}, **sections)
        return needed_bytes(config, monkeypatch) / checkpoint_bytes(config)

    plain = checkpoints()
    for windows, evaluations in ((5, 5), (10, 10), (10, 15), (20, 5), (15, 50)):
        for action, gold in (("pause", ""), ("rollback", "task"), ("stop_at_best", "")):
            guard = {"action": action, "tighten": "lr", "every_steps": windows}
            found = checkpoints(guard=guard, eval={"every_steps": evaluations, "gold_reward": gold}) - plain
            most = most_on_disk(windows, evaluations, has_gold=bool(gold)) - KEPT
            assert most <= round(found) <= most + 1, (guard, evaluations)
    assert round(checkpoints(alarms={"action": "stop"}, staleness={"max": 7}) - plain) == 3


def test_a_run_of_a_given_time_needs_space_for_one_model_of_a_step(good: Path, tmp_path: Path) -> None:
    def run_bytes(seconds: float, every: int) -> int:
        run = {"dir": tmp_path, "steps": 1_000_000, "seconds": seconds}
        return disk.run_bytes(make_config(good, run=run, checkpoint={"models_every_steps": every}), 0)

    model_bytes = (good / "model.safetensors").stat().st_size
    assert run_bytes(60.0, 10) - run_bytes(60.0, 0) == model_bytes
    assert run_bytes(0.0, 10) - run_bytes(0.0, 0) == 100_000 * model_bytes


def test_a_resumed_run_needs_no_space_for_existing_checkpoints(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = make_config(good, run={"dir": tmp_path}, checkpoint={"every_steps": 10})
    for step in (10, 20):
        folder = checkpoint_folder(fresh.run_dir, step)
        folder.mkdir(parents=True)
        write_training_state(
            folder,
            TrainingState(version=step, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={}),
        )
    for resume, there in ((fresh.run_dir, 2), (checkpoint_folder(fresh.run_dir, 10), 1)):  # step 20 stays
        resumed = changed(fresh, run={"resume": resume})
        saved = needed_bytes(fresh, monkeypatch) - needed_bytes(resumed, monkeypatch)
        assert saved == there * 12 * sum(t.numel() for t in load_file(good / "model.safetensors").values())


def test_the_disk_of_a_resume_is_that_of_the_run_wherever_it_is_started(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "far" / "run"
    checkpoint_folder(run_dir, 10).mkdir(parents=True)
    state = TrainingState(version=10, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={})
    write_training_state(checkpoint_folder(run_dir, 10), state)
    (tmp_path / "here").touch()  # run.dir is not even a folder here
    resumed = make_config(good, run={"dir": tmp_path / "here", "resume": run_dir})
    check(resumed)
    free = {run_dir: 2**29}
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    with pytest.raises(ConfigError, match=rf"a run in {run_dir}: 512 MiB free in {run_dir}.* or copy the run to ano"):
        check(resumed)
    monkeypatch.setattr(os, "access", lambda path, mode: path != run_dir)  # root may write anywhere
    with pytest.raises(ConfigError, match=rf"run\.resume {run_dir}: no permission .* Copy it and resume the copy"):
        check(resumed)


def test_a_disk_too_full_for_the_run_is_refused_with_the_numbers(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_config(good, run={"dir": tmp_path / "not" / "yet"}))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    with pytest.raises(ConfigError, match=r"512 MiB free in .*, 1\.0 GiB needed"):
        check(make_config(good, run={"dir": tmp_path / "not" / "yet"}))


@pytest.mark.parametrize(("resumes", "place", "remedy"), [
    (False, r"run\.dir", r"set run\.dir=\.\.\. to"), (True, r"run\.resume", "resume a copy of the run in"),
])  # fmt: skip
def test_what_a_host_of_logs_lacks_is_told_with_what_helps(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool, place: str, remedy: str
) -> None:
    run = {"resume": tmp_path / "runs" / "r"} if resumes else {"dir": tmp_path / "runs", "name": "r"}
    config = make_config(good, run=run)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    with pytest.raises(ConfigError, match=rf"logs of this host in {tmp_path}/runs/r: .* or {remedy} a folder of "):
        disk.check_log_disk(config)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match=rf"^{place} {tmp_path}/runs/r: no permission .* or {remedy} a folder"):
        disk.check_log_disk(config)
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=rf"^{place} must be a folder or not exist yet"):
        disk.check_log_disk(config)


def test_incomplete_weight_files_are_refused(good: Path, tmp_path: Path) -> None:
    whole = (good / "model.safetensors").read_bytes()
    for content in (whole[:100], b"", b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
            check(make_config(tmp_path, run={"dir": tmp_path / "runs"}))


def test_a_run_dir_that_is_no_folder_is_refused(good: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "runs", tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"run\.dir must be a folder or not exist .*/(file|link) is no folder"):
            check(make_config(good, run={"dir": run_dir}))


def test_a_run_dir_that_can_not_be_created_is_refused(good: Path, tmp_path: Path) -> None:
    too_long = make_config(good, run={"dir": tmp_path, "name": "x" * 300})
    with pytest.raises(ConfigError, match=r"run\.dir, run\.name: .*xxx can't be created: File name too long"):
        new_run_dir(too_long)


def test_a_run_dir_without_permission_is_refused(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="no permission to write in"):
        check(make_config(good, run={"dir": tmp_path / "runs"}))


def test_a_disk_that_fills_up_during_a_run_is_one_clear_error(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_to_a_full_disk(config: Config, *_: object) -> None:
        with open("/dev/full", "w") as file:
            file.write("metrics")

    monkeypatch.setattr(pipeline, "_run", write_to_a_full_disk)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({
        "model": {"path": str(good)}, "task": {"name": "reasoning_gym/spell_backward"}, "eval": {"size": 0},
    }))  # fmt: skip
    assert main(["train", str(tmp_path / "c.yaml"), f"run.dir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert f"async-rl: error: a disk is full: {tmp_path}/run can't be written (No space" in error
    assert f"--resume {tmp_path}/run" in error


def test_another_write_error_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), full_disk_named(tmp_path):
        (tmp_path / "none" / "file").write_text("")
