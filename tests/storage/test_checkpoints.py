"""Checkpoint folders: which are complete, which one a run resumes from, which are removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.base.config import CheckpointConfig
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    checkpoint_folder,
    find_checkpoint,
    list_checkpoints,
    read_training_state,
    run_dir_of,
    to_remove,
    write_training_state,
)
from async_rl.base.run_dir.resuming import rename_later
from tests.kit.runs import make_checkpoint, training_state


def save(run_dir: Path, *versions: int) -> None:
    for version in versions:
        make_checkpoint(run_dir, version)


def test_a_training_state_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    fields = {"networks": {"policy": {"steps": 7}}, "kl_coef": 0.1, "buffer": {"live": [[1, 2, 3]]}}
    assert read_training_state(make_checkpoint(tmp_path, 7, **fields)) == training_state(7, **fields)


def test_a_run_resumes_from_its_newest_complete_checkpoint_or_the_named_one(tmp_path: Path) -> None:
    save(tmp_path, 20, 100, 3)
    (tmp_path / "checkpoints" / "step_200.partial").mkdir()
    (tmp_path / "checkpoints" / "step_300").mkdir()
    assert list(list_checkpoints(tmp_path)) == [3, 20, 100]
    assert find_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 100)
    assert find_checkpoint(tmp_path / "checkpoints" / "step_20") == checkpoint_folder(tmp_path, 20)


@pytest.mark.parametrize(
    ("where", "path"), [("checkpoints", "step_7"), ("checkpoints", ".."), ("checkpoints/step_7", "."), ("", ".")]
)
def test_a_checkpoint_named_by_a_relative_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, path: str
) -> None:
    save(tmp_path / "x", 7)
    monkeypatch.chdir(tmp_path / "x" / where)
    assert find_checkpoint(path) == checkpoint_folder(tmp_path / "x", 7)
    assert run_dir_of(find_checkpoint(path)).name == "x"


@pytest.mark.parametrize(("path", "hint"), [("none", "no such folder"), ("", "checkpoint.every_steps")])
def test_nothing_to_resume_from_is_refused(tmp_path: Path, path: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        find_checkpoint(tmp_path / path)


def test_a_checkpoint_outside_of_a_run_directory_is_refused(tmp_path: Path) -> None:
    """A resume would take the folder two levels up for the run's own."""
    save(tmp_path / "run", 5)
    copied = tmp_path / "home" / "keep" / "step_5"
    shutil.copytree(checkpoint_folder(tmp_path / "run", 5), copied)
    with pytest.raises(ConfigError, match=f"got {copied}"):
        find_checkpoint(copied)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "name"),
    [(cut_short, "__0_0.distcp"), (Path.unlink, ".metadata"), (cut_short, "training_state.json")],
)
def test_a_damaged_checkpoint_is_named_with_its_file_and_the_newest_whole_one(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    for version in (1, 2, 3, 4):
        folder = checkpoint_folder(tmp_path, version)
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
        (folder / ".metadata").write_bytes(bytes(10))
        write_training_state(folder, training_state(version))
    damage(checkpoint_folder(tmp_path, 4) / name)
    cut_short(checkpoint_folder(tmp_path, 3) / "__0_0.distcp")
    for asked in (tmp_path, checkpoint_folder(tmp_path, 4)):
        with pytest.raises(ConfigError, match=rf"step_4 .*{name}.* --resume .*/checkpoints/step_2$"):
            find_checkpoint(asked)
    assert find_checkpoint(checkpoint_folder(tmp_path, 2)) == checkpoint_folder(tmp_path, 2)
    cut_short(checkpoint_folder(tmp_path, 2) / ".metadata")
    cut_short(checkpoint_folder(tmp_path, 1) / ".metadata")
    with pytest.raises(ConfigError) as failure:
        find_checkpoint(tmp_path)
    assert "--resume" not in str(failure.value), "no other is whole"


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "values", "removed"),
    [
        (2, 0, {}, [1, 2, 3]),
        (9, 0, {}, []),
        (1, 1, {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.2}, [1, 2, 4]),  # among equal values the newer one
        (1, 2, {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.1, 5: 0.2}, [3, 4]),
        (1, 1, {1: 0.5, 2: 0.4}, [2, 4]),  # 3 is the next to be measured
        (2, 1, {1: 0.5, 2: 0.4}, [2]),
        (1, 1, {}, [2, 3, 4]),
    ],
)
def test_the_last_and_the_best_are_kept(
    keep_last: int, keep_best: int, values: dict[int, float], removed: list[int]
) -> None:
    config = CheckpointConfig(keep_last=keep_last, keep_best=keep_best)
    assert to_remove([1, 2, 3, 4, 5], config, values) == removed


def test_a_checkpoint_that_a_resume_has_set_aside_is_exported_but_not_resumed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    rename_later(checkpoint_folder(tmp_path, 1), version=1, lineage=0)
    folder = tmp_path / "checkpoints" / "step_2.lineage_0"
    for marker in ("", "lineage_1 1 models"):  # of a later resume
        (tmp_path / ".resuming").write_text(marker)
        with pytest.raises(ConfigError, match=f"got {folder}"):
            find_checkpoint(folder)
    assert find_checkpoint(folder, resumes=False) == folder
    (tmp_path / ".resuming").write_text("lineage_0 1 models")
    assert find_checkpoint(folder) == folder, "the next resume puts it back"
