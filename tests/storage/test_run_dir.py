"""A run that fails before its first step leaves no directory; a later one keeps its directory."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.base.run_dir.resuming import find_run, is_complete
from async_rl.base.run_dir.run_dir import new_run_dir, write_config
from tests.kit.configs import changed, make_config, opened_run
from tests.kit.runs import make_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(run={"dir": tmp_path})


def empty_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").touch()


def log(run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rollout-0.log").write_text("it rains\n")


def evaluation(run_dir: Path) -> None:
    log(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.1}\n')


def step(run_dir: Path) -> None:
    log(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize(
    ("write", "error", "stays"),
    [
        (empty_metrics, ConfigError("no room"), False), (empty_metrics, WaitTimeoutError("no host"), False),
        (empty_metrics, KeyboardInterrupt(), False), (log, ConfigError("the port is taken"), False),
        (log, KeyboardInterrupt(), False), (evaluation, KeyboardInterrupt(), False), (step, KeyboardInterrupt(), True),
        (log, WaitTimeoutError("the server did not start"), True), (step, ConfigError("late"), True),
    ],
)
def test_a_new_run_directory_stays_if_it_explains_the_failure(
    config: Config, tmp_path: Path, write: Callable[[Path], None], error: BaseException, stays: bool
) -> None:
    (tmp_path / "run").mkdir()  # of another run
    with pytest.raises(type(error)), opened_run(config) as opened:
        write(opened.run_dir)
        raise error
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["run", "run-2"][: 1 + stays]


def test_a_run_is_gone_on_with_if_it_has_a_checkpoint(config: Config, tmp_path: Path) -> None:
    assert find_run(config) is None
    (tmp_path / "run").mkdir()
    assert find_run(config) is None, "it ended before its first checkpoint"
    assert [new_run_dir(config).name for _ in range(2)] == ["run-2", "run-3"]
    make_checkpoint(tmp_path / "run-2", 3)
    (tmp_path / "run-5").mkdir()
    make_checkpoint(tmp_path / "run-5", 9)  # of a run of this name, because there is no run-4
    assert find_run(config) == tmp_path / "run-2"
    assert find_run(changed(config, run={"name": "run-5"})) == tmp_path / "run-5"
    (tmp_path / "run-3" / "summary.json").write_text('{"steps": 20, "ended": "solved"}')
    assert find_run(config) == tmp_path / "run-3", "it ended by itself, without a checkpoint"


def test_a_run_whose_own_name_ends_in_a_number_is_another_run(config: Config, tmp_path: Path) -> None:
    for name in ("run", "run-2"):
        make_checkpoint(new_run_dir(changed(config, run={"name": name})), 3)
    assert find_run(config) == tmp_path / "run"
    make_checkpoint(new_run_dir(config), 5)
    assert find_run(config) == tmp_path / "run-3"
    assert find_run(changed(config, run={"name": "run-2"})) == tmp_path / "run-2"
    make_checkpoint(tmp_path / "run-4", 7)  # it does not say for which name it was made
    assert find_run(config) == tmp_path / "run-4"


@pytest.mark.parametrize(
    ("summary", "seconds", "expected"),
    [
        (None, 0.0, False),  # killed after its last step, before its end
        ({"steps": 8}, 0.0, True),
        ({"steps": 8, "interrupted": True}, 0.0, False),
        ({"steps": 5, "ended": "stopped at version 5", "interrupted": True}, 0.0, False),
        ({"steps": 7, "ended": "an alarm"}, 0.0, True),
        ({"steps": 6, "ended": "an alarm"}, 0.0, False),  # it went on, to the checkpoint of version 7
        ({"steps": 7, "ended": "a fall", "rolled_back": 3}, 0.0, False),
        ({"steps": 7}, 0.0, False),  # of fewer run.steps than now
        ({"steps": 7}, 60.0, True),
        ({"steps": 0, "ended": "all rewards are equal"}, 60.0, False),  # an error, which may be tried again
    ],
)  # fmt: skip
def test_a_run_is_complete_if_its_summary_tells_of_an_end_of_its_own(
    config: Config, tmp_path: Path, summary: dict[str, object] | None, seconds: float, expected: bool
) -> None:
    if summary is None or summary["steps"]:
        make_checkpoint(tmp_path, 7)
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert is_complete(tmp_path, changed(config, run={"steps": 8, "seconds": seconds})) == expected


def test_a_run_that_was_cut_short_after_its_last_step_is_resumed_for_its_end(config: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_checkpoint(run_dir, 8)
    again = changed(config, run={"steps": 8, "resume": run_dir})
    with opened_run(again) as opened:
        assert opened.run.resume == str(checkpoint_folder(run_dir, 8))
    (run_dir / "summary.json").write_text('{"steps": 8}')
    with pytest.raises(ConfigError, match=r"^run\.steps .*8"), opened_run(again):
        raise AssertionError("it is complete")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_file_locks_is_named_and_is_no_other_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"got .*/run/\.lock"), opened_run(config):
        raise AssertionError("it has no lock")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("summary", "back_to", "trained_to"), [({"steps": 6, "ended": "an alarm"}, 2, 4), ({"steps": 8}, 4, 8)]
)  # fmt: skip
def test_a_run_that_went_back_to_a_checkpoint_after_its_end_is_not_complete(
    config: Config, tmp_path: Path, summary: dict[str, object], back_to: int, trained_to: int
) -> None:
    run_dir, asked = tmp_path / "run", changed(config, run={"steps": 8})
    for version in (2, 4, summary["steps"]):
        assert isinstance(version, int)
        make_checkpoint(run_dir, version)
    (run_dir / "summary.json").write_text(json.dumps(summary | {"resumes": 0}))
    with opened_run(changed(asked, run={"resume": checkpoint_folder(run_dir, back_to)})) as again:
        assert is_complete(run_dir, asked), "the resume has made no step"
        write_config(again)
    assert not is_complete(run_dir, asked)
    make_checkpoint(run_dir, trained_to)
    assert not is_complete(run_dir, asked)
    with opened_run(changed(asked, run={"resume": run_dir})) as again:
        assert again.run.resume == str(checkpoint_folder(run_dir, trained_to))
    (run_dir / "summary.json").write_text(json.dumps(summary | {"resumes": 1}))
    assert is_complete(run_dir, asked)
