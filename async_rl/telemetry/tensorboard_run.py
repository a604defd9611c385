"""Writes metrics as event files of TensorBoard, in such a way that it can't end a run.

tensorboardX, an extra of this package, is imported only when `logging.tensorboard` is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.seams.extras import lacking
from async_rl.storage.checkpoints import resumed_training_state
from async_rl.telemetry.tracker import Tracker

FLUSH_EVERY_S = 10


def open_tensorboard_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> TensorboardRun | None:
    """Return the writer that `logging.tensorboard` asks for, or None if it is off or not installed.

    If the user asked for it and it is not installed, `note` gets the reason.
    """
    if not config.logging.tensorboard:
        return None
    if text := lacking("tensorboard"):
        note(f"tensorboard: off, it {text}")
        return None
    saved = resumed_training_state(config)
    run = TensorboardRun(partial(_open_writer, run_dir / "tensorboard", saved.version + 1 if saved else 0), note)
    if saved is None:
        run.begin_lineage()
    return run


def _open_writer(folder: Path, first_step: int) -> Any:
    """Return a SummaryWriter to a new file in `folder`, which has TensorBoard hide what the files before it hold from
    `first_step` on, the first of a resume; 0: of a new run.
    """
    from tensorboardX import SummaryWriter

    suffix = f".{len(list(folder.glob('events.*')))}"  # a name has the second of its start, in which another may be
    purge_step = first_step or None
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_EVERY_S, filename_suffix=suffix)


class TensorboardRun(Tracker):
    """Passes the metrics of a run to a SummaryWriter. A resumed run adds a file to the same folder.

    Args:
        open_writer: returns the SummaryWriter. It is called by `begin_lineage`, because a resume that is undone must
            not hide the steps that the run then has again. Records before that, as of an evaluation, wait for it.
    """

    library = "tensorboard"

    def __init__(self, open_writer: Callable[[], Any], note: Callable[[str], None]) -> None:
        super().__init__(None, note)
        self._open_writer = open_writer
        self._early: list[Mapping[str, float]] = []

    def begin_lineage(self) -> None:
        if self._run is None:
            self._attempt(self._begin)

    def log(self, record: Mapping[str, float]) -> None:
        """Write a record, whose key `step` is the step; values that are not finite are left out."""
        self._attempt(lambda: self._write(record))

    def close(self) -> None:
        if self._run is not None:
            self._attempt(self._run.close)

    def _begin(self) -> None:
        self._run = self._open_writer()
        while self._early:
            self._write(self._early.pop(0))

    def _write(self, record: Mapping[str, float]) -> None:
        if self._run is None:
            self._early.append(record)
            return
        for key, value in record.items():
            if key != "step" and math.isfinite(value):
                self._run.add_scalar(key, value, int(record["step"]))
