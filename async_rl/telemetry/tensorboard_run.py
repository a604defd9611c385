"""Writes metrics as event files of TensorBoard, in such a way that it can't end a run.

tensorboardX, an extra of this package, is imported only when `logging.tensorboard` is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.config import Config
from async_rl.seams.extras import lacking
from async_rl.telemetry.tracker import Tracker

FLUSH_EVERY_S = 10


def open_tensorboard_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> TensorboardRun | None:
    """Return the writer that `logging.tensorboard` asks for, or None if it is off, not installed or does not start.

    If the user asked for it and it is off, `note` gets the reason.
    """
    if not config.logging.tensorboard:
        return None
    if text := lacking("tensorboard"):
        note(f"tensorboard: off, it {text}")
        return None
    try:
        from tensorboardX import SummaryWriter

        folder = run_dir / "tensorboard"
        suffix = f".{len(list(folder.glob('events.*')))}"  # a name has the second of its start, in which another may be
        writer = SummaryWriter(str(folder), flush_secs=FLUSH_EVERY_S, filename_suffix=suffix)
    except Exception as error:  # nothing that tensorboardX raises may end the run
        note(f"tensorboard: off, it did not start: {type(error).__name__}: {error}")
        return None
    return TensorboardRun(writer, note)


class TensorboardRun(Tracker):
    """Passes the metrics of a run to a SummaryWriter. A resumed run adds a file to the same folder."""

    library = "tensorboard"

    def log(self, record: Mapping[str, float]) -> None:
        """Write a record, whose key `step` is the step; values that are not finite are left out."""
        self._attempt(lambda: self._write(record))

    def close(self) -> None:
        self._attempt(self._run.close)

    def _write(self, record: Mapping[str, float]) -> None:
        for key, value in record.items():
            if key != "step" and math.isfinite(value):
                self._run.add_scalar(key, value, int(record["step"]))
