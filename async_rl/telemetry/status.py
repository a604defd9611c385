"""Who waits on whom, since when: `run_dir/status.json`, which the driver writes and `async-rl status` prints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from async_rl.errors import ConfigError

STALE_S = 30.0
"""A running driver writes more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one process does at one moment."""

    process: str = ""
    host: str = ""
    doing: str
    waits_on: str = ""
    """Another process, or what it is to do; empty where this one works by itself."""
    since_s: float
    """time.time() of when it began."""
    told_s: float = field(default_factory=time.time)
    """When the process said so, by the same clock; that of another host may be wrong."""
    limit_s: float = 0.0
    """After so long it gives up by itself; 0: it does not wait."""

    @property
    def waited_s(self) -> float:
        """Until it was told."""
        return self.told_s - self.since_s


def write_status(run_dir: Path, statuses: Sequence[Status], note: str) -> None:
    """
    Args:
        note: on the run as a whole: `running`, or how it ended.
    """
    partial = run_dir / "status.json.partial"
    partial.write_text(json.dumps({"note": note, "time_s": time.time(), "processes": [asdict(s) for s in statuses]}))
    os.replace(partial, run_dir / "status.json")


def format_status(run_dir: Path) -> str:
    """A table of who waits on whom.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    try:
        told = json.loads((run_dir / "status.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"{run_dir} has no status.json ({error.strerror}): it is not a run directory, or the run has just begun"
        ) from None
    now_s = time.time()
    age_s = now_s - told["time_s"]
    text = f"{run_dir}, {age_s:.0f} s ago: {told['note']}\n"
    if told["note"] == "running" and age_s > STALE_S:
        text += "The driver writes no more: it was killed, or hangs.\n"
    rows = [("process", "host", "does", "waits on", "for", "at most")]
    for status in (Status(**entry) for entry in told["processes"]):
        limit = f"{status.limit_s:.0f} s" if status.limit_s else "-"
        since = f"{status.waited_s:.0f} s"
        rows.append((status.process, status.host, status.doing, status.waits_on or "-", since, limit))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return text + "".join(line + "\n" for line in lines)
