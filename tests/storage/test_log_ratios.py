"""The files of log importance ratios: what is written is read back, old files go, and a resume takes files over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.run_dir.log_ratio_file import (
    FOLDER,
    LogRatioWriter,
    StepLogRatios,
    link_past,
    read_log_ratios,
)
from tests.kit.documents import DOCUMENTS, ROOT, blocks


def ratios(group_id: int = 7, learner: bool = True) -> StepLogRatios:
    """The ratios of answers 0 and 2 of a group, of two and of three tokens."""
    proximal = np.array([0.5, -0.25, np.nan, 0.125, 1.0], np.float16)
    return StepLogRatios(
        np.array([group_id, group_id]), np.array([0, 2], np.int32), np.array([2, 3], np.int32), proximal,
        proximal / 2 if learner else None,
    )  # fmt: skip


def write(run_dir: Path, steps: range, keep_steps: int = -1, rank: int = 0) -> None:
    for step in steps:  # a writer for each, as its queue is short
        writer = LogRatioWriter(run_dir, rank, keep_steps)
        writer.write(step, ratios())
        writer.close()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / FOLDER).iterdir())


def test_the_ratios_of_an_answer_are_read_back(tmp_path: Path) -> None:
    write(tmp_path, range(3, 4))
    found = read_log_ratios(tmp_path, 3, 7, 2)
    assert found is not None and found.learner is not None
    np.testing.assert_array_equal(found.proximal, np.array([np.nan, 0.125, 1.0], np.float16))
    np.testing.assert_array_equal(found.learner, found.proximal / 2)
    assert read_log_ratios(tmp_path, 3, 7, 1) is None
    assert read_log_ratios(tmp_path, 4, 7, 2) is None
    assert read_log_ratios(tmp_path / "none", 3, 7, 2) is None


def test_the_program_on_the_page_reads_a_file_that_the_quickstart_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    run_dir = tmp_path / config.run_dir
    run_dir.mkdir(parents=True)
    for step in (40, config.run.steps):
        write(run_dir, range(step, step + 1), config.journal_kept_steps)
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(DOCUMENTS["docs/reference/run-directory.md"], "python")
    exec(program, {})
    assert float(capsys.readouterr().out) == pytest.approx(np.e)


def test_the_file_of_each_rank_is_searched(tmp_path: Path) -> None:
    for rank, group_id in ((0, 7), (1, 8)):
        writer = LogRatioWriter(tmp_path, rank, -1)
        writer.write(1, ratios(group_id, learner=False))
        writer.close()
    found = read_log_ratios(tmp_path, 1, 8, 0)
    assert found is not None
    assert (found.proximal.tolist(), found.learner) == ([0.5, -0.25], None)


def test_rank_0_removes_the_files_of_old_steps_of_every_rank(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), rank=1)
    write(tmp_path, range(1, 5), keep_steps=2)
    assert names(tmp_path) == ["step_3.rank_0.npz", "step_4.rank_0.npz"]


def test_a_damaged_file_holds_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    file = tmp_path / FOLDER / "step_1.rank_0.npz"
    for damaged in (file.read_bytes()[:-30], b"", b"PK not a zip file"):
        file.write_bytes(damaged)
        assert read_log_ratios(tmp_path, 1, 7, 0) is None


def test_a_resume_takes_the_files_up_to_its_checkpoint_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    (tmp_path / FOLDER).rename(tmp_path / "trajectories.lineage_2.sqlite-log-ratios")
    link_past(tmp_path, lineage=2, version=2)
    assert names(tmp_path) == ["step_1.rank_0.npz", "step_2.rank_0.npz"]
    link_past(tmp_path, lineage=2, version=2)  # a second call changes nothing
    link_past(tmp_path, lineage=1, version=3)  # there is nothing of that lineage: those of the last are taken
    assert names(tmp_path) == [f"step_{step}.rank_0.npz" for step in (1, 2, 3)]
    assert read_log_ratios(tmp_path, 2, 7, 2) is not None


def test_a_disk_that_fails_ends_the_writing_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = LogRatioWriter(tmp_path / "missing", 0, -1)
    writer.write(1, ratios())
    writer.write(2, ratios())
    writer.close()
    assert capsys.readouterr().err.count("missing") == 1
