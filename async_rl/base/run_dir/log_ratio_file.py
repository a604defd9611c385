"""Stores the log importance ratios of trained tokens next to the journal: one file for each step and learner rank.

    trajectories.sqlite-log-ratios/step_12.rank_0.npz      read it with numpy.load
        group_ids, rows, lengths  [A]                   the rank's rows: group, number in the group, tokens T
        proximal                      [sum of T] float16    proximal - behaviour logprob, row after row
        learner                       [sum of T] float16    learner - proximal logprob in the last pass over the token

Tokens that were not trained on are NaN. `learner` is missing with one optimizer step a batch, where it would be 0.
The file has differences and not logprobs: in float16 they give a ratio near 1 with three digits.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.base.run_dir.checkpoints import past_file

FOLDER = "trajectories.sqlite-log-ratios"
PAST_FOLDER = "trajectories.lineage_{lineage}.sqlite-log-ratios"
"""The new name that a resume gives to the folder of the previous lineage."""
MAX_WAITING = 4
"""The most steps that may wait to be written. On a slower disk later steps are left out."""
CLOSE_LIMIT_S = 30.0
_NAME = re.compile(r"step_(\d+)\.rank_\d+\.npz")

Float16Array = npt.NDArray[np.float16]


class StepLogRatios(NamedTuple):
    """The log ratios of the rows that one learner rank trained on in one step: the content of one file."""

    group_ids: npt.NDArray[np.int64]  # [A]
    rows: npt.NDArray[np.int32]  # [A]
    lengths: npt.NDArray[np.int32]  # [A]
    proximal: Float16Array  # [sum of lengths]
    learner: Float16Array | None  # [sum of lengths]


class RowLogRatios(NamedTuple):
    """The log ratios of one row of T tokens, with the fields of the file."""

    proximal: Float16Array  # [T]
    learner: Float16Array | None  # [T]


class LogRatioWriter:
    """Writes one rank's files in a thread, so that no step waits for the disk. A disk error ends only the writing.

    The files of the last `keep_steps` steps are kept (-1: all). Rank 0 removes the older files of every rank.
    """

    def __init__(self, run_dir: Path, rank: int, keep_steps: int) -> None:
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._keep_steps = keep_steps
        self._waiting: queue.Queue[tuple[int, StepLogRatios] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, daemon=True, name="log-ratios")
        self._thread.start()

    def write(self, step: int, ratios: StepLogRatios) -> None:
        """Queue the file of a step for writing. If MAX_WAITING others are waiting, the step is left out."""
        if not self._waiting.full():
            self._waiting.put_nowait((step, ratios))

    def close(self) -> None:
        """Wait at most CLOSE_LIMIT_S until all queued files are written."""
        try:
            self._waiting.put(None, timeout=CLOSE_LIMIT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_LIMIT_S)

    def _work(self) -> None:
        failed = False
        while (item := self._waiting.get()) is not None:
            if failed:
                continue
            try:
                self._save(*item)
            except OSError as error:
                failed = True
                text = "importance ratios are not recorded any more, and the run goes on"
                print(f"{text}: {error}", file=sys.stderr, flush=True)

    def _save(self, step: int, ratios: StepLogRatios) -> None:
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"step_{step}.rank_{self._rank}.npz"
        partial = file.with_suffix(".partial")
        with partial.open("wb") as opened:
            np.savez(opened, **{name: values for name, values in ratios._asdict().items() if values is not None})
        partial.replace(file)
        if self._rank == 0 and self._keep_steps >= 0:
            for saved_step, old in _files(self._folder):
                if saved_step <= step - self._keep_steps:
                    old.unlink(missing_ok=True)


def read_log_ratios(run_dir: Path, step: int, group_id: int, row: int) -> RowLogRatios | None:
    """Return the log ratios of a row that was trained on in `step`; None if the file is missing or damaged.

    Args:
        row: the number of the row in its group.
    """
    for file in sorted((run_dir / FOLDER).glob(f"step_{step}.rank_*.npz")):
        try:
            with np.load(file) as saved:
                found = np.flatnonzero((saved["group_ids"] == group_id) & (saved["rows"] == row))
                if not len(found):
                    continue
                end = int(saved["lengths"][: found[0] + 1].sum())
                part = slice(end - int(saved["lengths"][found[0]]), end)
                learner = saved["learner"][part] if "learner" in saved else None
                return RowLogRatios(saved["proximal"][part], learner)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue
    return None


def link_past(run_dir: Path, lineage: int, version: int) -> None:
    """Link the files of steps up to `version` from an earlier lineage into the current folder, when a run is resumed.
    """
    for step, file in _files(past_file(run_dir, PAST_FOLDER, lineage)):
        target = run_dir / FOLDER / file.name
        if step <= version and not target.exists():
            target.parent.mkdir(exist_ok=True)
            try:
                os.link(file, target)  # safe: files are replaced and never changed
            except OSError:
                shutil.copyfile(file, target)


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of each complete file in a folder; [] if there is no such folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((_NAME.fullmatch(path.name), path) for path in paths)
    return [(int(name[1]), path) for name, path in found if name]
