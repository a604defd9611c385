"""Sends metrics to trackio, the local dashboard of Hugging Face, in such a way that it can't end a run.

trackio is imported only when `logging.trackio` is on. It is no dependency of this package.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.config import Config
from async_rl.telemetry.tracker import Tracker


def open_trackio_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> TrackioRun | None:
    """Return the trackio run that `logging.trackio` asks for, or None if it is off, not installed or does not start.

    If the user asked for it and it is off, `note` gets the reason.
    """
    if not config.logging.trackio:
        return None
    # trackio tells runs apart by their names alone, and run.name is unique in its run.dir alone. With the name in this
    # file, a resumed run continues the same trackio run, and no other does.
    name_file = run_dir / "trackio_name"
    if not name_file.is_file():
        name_file.write_text(f"{config.run.name}-{secrets.token_hex(4)}")
    try:
        import trackio

        run = trackio.init(
            project=config.logging.project, name=name_file.read_text(), config=dataclasses.asdict(config),
            resume="allow",
        )  # fmt: skip
    except ImportError:
        note("trackio: off, it is not installed. Run: pip install trackio")
        return None
    except Exception as error:  # nothing that trackio raises may end the run
        note(f"trackio: off, it did not start: {type(error).__name__}: {error}")
        return None
    return TrackioRun(run, note)


class TrackioRun(Tracker):
    """Passes the metrics of a run to trackio."""

    library = "trackio"

    def log(self, record: Mapping[str, float]) -> None:
        """Pass on a record, whose key `step` is the step; values that are not finite are left out."""
        values = {key: value for key, value in record.items() if key != "step" and math.isfinite(value)}
        self._attempt(lambda: self._run.log(values, step=int(record["step"])))
