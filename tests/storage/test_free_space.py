"""Free disk space is checked before a run, and a full disk is one clear error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from safetensors.torch import load_file

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir import free_space as disk
from async_rl.base.run_dir.run_dir import new_run_dir
from async_rl.cli import main
from learner.memory.sizes import checkpoint_bytes
from tests.kit.configs import changed, make_config
from tests.kit.runs import make_checkpoint


def check(config: Config) -> None:
    disk.check_disk(config, checkpoint_bytes(config))


def needed_bytes(config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """The least free space that `check_disk` accepts, found by bisection."""
    refused, accepted, of_checkpoint = 0, 2**40, checkpoint_bytes(config)
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=middle: SimpleNamespace(free=free))
        try:
            disk.check_disk(config, of_checkpoint)
        except ConfigError:
            refused = middle
        else:
            accepted = middle
    return accepted


def test_the_needed_space_counts_the_result_and_all_checkpoints_at_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in weights.values())
    model_bytes = (tiny_model / "model.safetensors").stat().st_size
    fixed = 2**30 + 3 * model_bytes  # the result, and two folders if auto becomes disk

    def checkpoints(steps: int = 100, advantage: str = "grpo", **checkpoint: int) -> float:
        """In parameters, of 12 bytes each."""
        config = make_config(
            tiny_model, run={"dir": tmp_path, "steps": steps}, checkpoint=checkpoint, algorithm={"advantage": advantage}
        )
        return (needed_bytes(config, monkeypatch) - fixed) / 12

    assert checkpoints(every_steps=10) == 3 * parameters  # keep_last 2, and the one that is being written
    assert checkpoints(every_steps=10, keep_last=4) == 5 * parameters
    assert checkpoints(every_steps=60) == 2 * parameters  # of steps 60 and 100
    assert checkpoints(every_steps=0) == 0
    assert checkpoints(every_steps=100, advantage="gae") == pytest.approx(2 * parameters, rel=0.001)  # and a value head
    sgd = make_config(tiny_model, run={"dir": tmp_path}, checkpoint={"every_steps": 10}, learner={"optimizer": "SGD"})
    assert needed_bytes(sgd, monkeypatch) - fixed == 3 * 4 * parameters
    lora = make_config(tiny_model, run={"dir": tmp_path}, model={"lora": {"rank": 1}})
    adapters = (needed_bytes(lora, monkeypatch) - fixed) / 12
    adapted = [tensor for name, tensor in weights.items() if name.endswith("_proj.weight")]
    assert adapters == sum(sum(tensor.shape) for tensor in adapted) < parameters / 4
    needed = {
        name: needed_bytes(make_config(tiny_model, run={"dir": tmp_path}, weight_sync={"transport": name}), monkeypatch)
        for name in ("auto", "disk", "gloo")
    }
    assert needed["auto"] == needed["disk"] == needed["gloo"] + 2 * model_bytes


def test_a_resumed_run_needs_space_for_the_checkpoints_that_it_lacks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = make_config(tiny_model, run={"dir": tmp_path / "far"}, checkpoint={"every_steps": 10})
    make_checkpoint(fresh.run_dir, 10)
    resumed = changed(fresh, run={"resume": fresh.run_dir, "dir": tmp_path / "here"})
    saved = needed_bytes(fresh, monkeypatch) - needed_bytes(resumed, monkeypatch)
    assert saved == checkpoint_bytes(fresh), "one of three is there"
    monkeypatch.setattr(os, "access", lambda path, mode: path != fresh.run_dir)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"run\.resume"):
        check(resumed)


def test_a_disk_too_full_for_the_run_is_refused_with_the_numbers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_config(tiny_model, run={"dir": tmp_path / "not" / "yet"}))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    with pytest.raises(ConfigError, match=r"run\.dir"):
        check(make_config(tiny_model, run={"dir": tmp_path / "not" / "yet"}))


def test_incomplete_weight_files_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    whole = (tiny_model / "model.safetensors").read_bytes()
    shutil.copytree(tiny_model, tmp_path / "model")
    for content in (whole[:100], b"", b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model" / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors|model\.path"):
            check(make_config(tmp_path / "model", run={"dir": tmp_path / "runs"}))


@pytest.mark.parametrize(("folder", "name"), [("file", "run"), (".", "x" * 300)])
def test_a_run_dir_that_can_not_be_created_is_refused(folder: str, name: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run\.dir"):
        new_run_dir(make_config(tiny_model, run={"dir": tmp_path / folder, "name": name}))
    if folder == "file":
        with pytest.raises(ConfigError, match=r"run\.dir"):
            check(make_config(tiny_model, run={"dir": tmp_path / folder}))


def test_a_disk_that_fills_up_during_a_run_is_one_clear_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: Path("/dev/full").write_text("a log"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({
        "model": {"path": str(tiny_model)}, "task": {"name": "reasoning_gym/spell_backward"},
        "eval": {"num_prompts": 0},
    }))  # fmt: skip
    assert main(["train", str(tmp_path / "c.yaml"), f"run.dir={tmp_path}"]) == 1
    assert f"--resume {tmp_path}/run" in capsys.readouterr().err
