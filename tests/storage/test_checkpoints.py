"""Checkpoint folders: which are complete, which one a run resumes from, which are removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import CheckpointConfig
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    FORMAT,
    checkpoint_folder,
    find_checkpoint,
    lineage_of,
    list_checkpoints,
    prune,
    read_training_state,
    run_dir_of,
    to_remove,
    write_training_state,
)
from async_rl.base.run_dir.resuming import rename_later
from tests.kit.configs import make_config
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


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 7)
    file = checkpoint_folder(tmp_path, 7) / "training_state.json"
    for other in ({"format": 0}, {"format": FORMAT + 1}):
        file.write_text(json.dumps(json.loads(file.read_text()) | other))
        with pytest.raises(ConfigError, match=f"format {FORMAT}, got ."):
            read_training_state(file.parent)
    file.write_text('{"version": 7}')
    with pytest.raises(ConfigError, match="got None"):
        read_training_state(file.parent)
    file.rename(file.with_name("cut.json"))  # as format 1 called it
    with pytest.raises(ConfigError, match=f"format {FORMAT}, got 1"):
        read_training_state(find_checkpoint(tmp_path))


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


def test_pruning_removes_folders(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    prune(tmp_path, CheckpointConfig(keep_last=1), {})
    assert list(list_checkpoints(tmp_path)) == [3]


def test_a_resume_from_an_older_checkpoint_renames_the_later_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / "step_4.partial").mkdir()
    rename_later(checkpoint_folder(tmp_path, 2), version=2, lineage=0)
    assert list(list_checkpoints(tmp_path)) == [1, 2]
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["step_1", "step_2", "step_3.lineage_0"]


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


def test_the_number_of_resumes_is_the_largest_of_the_files_that_they_have_set_aside(tmp_path: Path) -> None:
    assert lineage_of(tmp_path) == 0
    for name in ("config.lineage_0.yaml", "config.lineage_10.yaml", "config.lineage_x.yaml"):
        (tmp_path / name).touch()
    assert lineage_of(tmp_path) == 11
    for number, name in enumerate(("trajectories.{}.sqlite-payloads", "checkpoints/step_3.{}", "models/step_3.{}"), 11):
        (tmp_path / name.format(f"lineage_{number}")).mkdir(parents=True)
        assert lineage_of(tmp_path) == number + 1


def test_the_best_checkpoint_needs_an_evaluation_at_each(tmp_path: Path) -> None:
    make_config(checkpoint={"every_steps": 40, "keep_best": 1}, eval={"every_steps": 20})
    for every_steps, evals in ((40, 30), (40, 0), (20, 40)):
        with pytest.raises(ConfigError, match=r"^checkpoint\.every_steps .*eval\.every_steps"):
            make_config(checkpoint={"every_steps": every_steps, "keep_best": 1}, eval={"every_steps": evals})


def test_a_run_does_not_start_if_a_best_checkpoint_may_be_between_two_pushes() -> None:
    settings: dict[str, Any] = {
        "eval": {"every_steps": 5}, "weight_sync": {"every_steps": 2}, "staleness": {"max": 1},
    }  # fmt: skip
    make_config(checkpoint={"every_steps": 5, "keep_best": 0}, **settings)
    with pytest.raises(ConfigError, match=r"^checkpoint\.every_steps .*got 5"):
        make_config(checkpoint={"every_steps": 5, "keep_best": 1}, **settings)
