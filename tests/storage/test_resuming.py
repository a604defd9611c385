"""A resume sets aside what was written after its checkpoint, and puts it back if it makes no step."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest

from async_rl.base.config import Config, LoraConfig
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.base.run_dir.checkpoints import (
    checkpoint_folder,
    find_checkpoint,
    list_checkpoints,
    model_folder,
)
from async_rl.base.run_dir.resuming import check_newest, config_file, undo_resume
from async_rl.base.run_dir.run_dir import write_config
from tests.kit.configs import changed, make_config, opened_run
from tests.kit.runs import make_checkpoint


def save_model(run_dir: Path, version: int, text: str) -> None:
    folder = model_folder(run_dir, version)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)


@pytest.fixture
def stopped(tmp_path: Path) -> Config:
    """A resume from step 1 of a run that has gone on to step 2, with all the files of a run."""
    run_dir = tmp_path / "run"
    for version in (1, 2):
        make_checkpoint(run_dir, version)
        save_model(run_dir, version, f"version {version} of the first run")
    (run_dir / "trajectories.sqlite-payloads").mkdir()
    for name in ("trajectories.sqlite", "trajectories.sqlite-wal", "trajectories.sqlite-payloads/0", "timeline.json"):
        (run_dir / name).write_text(f"{name} of the first run")
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (run_dir / "status.json").write_text("the first run ended normally, with alarms")
    (run_dir / "config.yaml").write_text(f"run: {{name: run, dir: {tmp_path}}}\n")
    return make_config(run={"dir": tmp_path, "resume": checkpoint_folder(run_dir, 1)})


def files(run_dir: Path) -> dict[str, str]:
    found = (file for file in run_dir.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(run_dir)): file.read_text() for file in found}


def begin_anew(run_dir: Path) -> None:
    """Write what the processes of a resumed run write before their first step is logged."""
    (run_dir / "trajectories.sqlite-payloads").mkdir()
    (run_dir / "status.json").write_text("the resumed run was interrupted")
    for name in ("trajectories.sqlite", "trajectories.sqlite-shm", "trajectories.sqlite-payloads/7", "timeline.json"):
        (run_dir / name).write_text("of the resumed run")
    save_model(run_dir, 2, "version 2 of the resumed run")


@pytest.mark.parametrize("error", [ConfigError("other shapes"), WaitTimeoutError("no start"), KeyboardInterrupt()])
def test_a_resume_that_fails_before_its_first_step_changes_no_file(
    stopped: Config, tmp_path: Path, error: BaseException
) -> None:
    before = files(tmp_path / "run")
    for write in (lambda _: None, begin_anew):
        with pytest.raises(type(error)), opened_run(stopped) as opened:
            write(opened.run_dir)
            raise error
        assert files(tmp_path / "run") == before


def test_a_resume_that_was_killed_before_its_first_step_is_undone_by_the_next(stopped: Config, tmp_path: Path) -> None:
    before = files(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), opened_run(stopped) as opened:
        begin_anew(opened.run_dir)
        shutil.copytree(opened.run_dir, tmp_path / "killed" / "run")
        raise KeyboardInterrupt
    newest = dataclasses.replace(stopped.run, resume=str(tmp_path / "killed" / "run"))
    with pytest.raises(KeyboardInterrupt), opened_run(dataclasses.replace(stopped, run=newest)) as again:
        assert again.run.resume == str(checkpoint_folder(tmp_path / "killed" / "run", 2))
        raise KeyboardInterrupt
    assert files(tmp_path / "killed" / "run") == before


@pytest.mark.parametrize("name", ["step_2", "step_2.lineage_0"])
def test_a_checkpoint_that_a_killed_resume_has_set_aside_is_found_by_both_names(
    stopped: Config, tmp_path: Path, name: str
) -> None:
    killed = tmp_path / "killed" / "run"
    with pytest.raises(KeyboardInterrupt), opened_run(stopped) as opened:
        shutil.copytree(opened.run_dir, killed)
        raise KeyboardInterrupt
    assert find_checkpoint(killed / "checkpoints" / name) == killed / "checkpoints" / "step_2.lineage_0"
    with pytest.raises(ConfigError, match=r"step_2\.lineage_0"):
        check_newest(killed)
    with opened_run(changed(stopped, run={"resume": killed / "checkpoints" / name})) as again:
        assert again.run.resume == str(killed / "checkpoints" / "step_2")
    assert files(killed) == files(tmp_path / "run")
    check_newest(killed)


@pytest.mark.parametrize("marker", ["", "lineage_0"])
def test_a_resume_whose_marker_was_cut_short_by_a_full_disk_has_changed_nothing(
    stopped: Config, tmp_path: Path, marker: str
) -> None:
    before = files(tmp_path / "run")
    (tmp_path / "run" / ".resuming").write_text(marker)
    with pytest.raises(KeyboardInterrupt), opened_run(stopped):
        raise KeyboardInterrupt
    assert files(tmp_path / "run") == before


def test_a_resume_that_fails_while_it_sets_checkpoints_aside_puts_them_back(
    stopped: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "run", 3, lineage=1)  # what the resume before has set aside was deleted
    before, rename, renamed = files(tmp_path / "run"), Path.rename, []

    def fail_at_the_second(path: Path, target: Path) -> None:
        renamed.append(path.name)
        if len(renamed) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_second)
    with pytest.raises(OSError, match="Input/output error"), opened_run(stopped):
        raise AssertionError("a checkpoint could not be renamed")
    assert renamed[:2] == ["step_2", "step_3"] and files(tmp_path / "run") == before


def test_a_resume_that_was_killed_keeps_its_settings_if_it_has_made_a_checkpoint(
    stopped: Config, tmp_path: Path
) -> None:
    killed = tmp_path / "killed" / "run"
    with pytest.raises(KeyboardInterrupt), opened_run(changed(stopped, learner={"lr": 0.125})) as opened:
        begin_anew(opened.run_dir)
        make_checkpoint(opened.run_dir, 3, lineage=1)
        shutil.copytree(opened.run_dir, killed)
        raise KeyboardInterrupt
    (killed / "config.lineage_0.yaml").unlink()  # by the user
    for run_dir in (tmp_path / "run", killed):
        assert "lr: 0.125" in config_file(run_dir).read_text(), "the next resume begins with it"
        undo_resume(run_dir)
        assert "lr: 0.125" in (run_dir / "config.yaml").read_text() and list(list_checkpoints(run_dir)) == [1, 3]
        assert not {".resuming", "config.resuming.yaml"} & files(run_dir).keys()
    (killed / ".resuming").write_text("lineage_0 1 models")
    discarded = changed(stopped, run={"resume": killed / "checkpoints" / "step_2"})
    with pytest.raises(ConfigError, match=r"step_2\.lineage_0"), opened_run(discarded):
        raise AssertionError("the run has gone on without it")


def test_a_resume_that_was_killed_as_it_wrote_its_config_is_undone(stopped: Config, tmp_path: Path) -> None:
    before = files(tmp_path / "run")
    killed = tmp_path / "killed" / "run"
    with pytest.raises(KeyboardInterrupt), opened_run(stopped) as opened:
        shutil.copytree(opened.run_dir, killed)
        raise KeyboardInterrupt
    shutil.copy(killed / "config.resuming.yaml", killed / "config.yaml")
    assert config_file(killed).read_text() == before["config.yaml"]
    undo_resume(killed)
    assert files(killed) == before


def test_a_resume_with_another_model_is_refused(stopped: Config, tmp_path: Path) -> None:
    """Its weights may fit, but the reference of the KL term would be another policy."""
    write_config(stopped)
    before = files(tmp_path / "run")
    other = changed(stopped, model={"path": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"^model\.path"), opened_run(other):
        pass
    assert files(tmp_path / "run") == before


def test_a_resume_with_another_alpha_than_that_of_its_adapters_is_refused(stopped: Config, tmp_path: Path) -> None:
    first = changed(stopped, model={"lora": LoraConfig(rank=2, alpha=32.0)})
    write_config(first)
    with opened_run(first) as opened:
        write_config(opened)
    before = files(tmp_path / "run")
    other = changed(first, model={"lora": LoraConfig(rank=2, alpha=16.0)})
    with pytest.raises(ConfigError, match=r"^model\.lora\.alpha "), opened_run(other):
        raise AssertionError("its adapters would weigh half as much")
    assert files(tmp_path / "run") == before


def test_a_resume_with_a_step_keeps_what_it_set_aside(stopped: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    before = files(run_dir)
    with pytest.raises(WaitTimeoutError), opened_run(stopped) as opened:
        begin_anew(run_dir)
        assert files(run_dir)["config.yaml"] == before["config.yaml"]
        write_config(opened)
        raise WaitTimeoutError("later")
    after = files(run_dir)
    journal = ("trajectories{}.sqlite", "trajectories{}.sqlite-payloads/0")
    for name in (*journal, "timeline{}.json", "status{}.json", "config{}.yaml"):
        assert after[name.format(".lineage_0")] == before[name.format("")]
    assert (after["metrics.jsonl"], after["metrics.lineage_0.jsonl"]) == ('{"step": 1}\n', '{"step": 2}\n')
    assert after["timeline.json"] == "of the resumed run" and "staleness" in after["config.yaml"]
    assert list(list_checkpoints(run_dir)) == [1] and (run_dir / "checkpoints" / "step_2.lineage_0").is_dir()
    assert {name: text for name, text in after.items() if name.startswith("models/")} == {
        "models/step_1/config.json": "version 1 of the first run",
        "models/step_2/config.json": "version 2 of the resumed run",
        "models/step_2.lineage_0/config.json": "version 2 of the first run",
    }
