"""The status of a run, which the driver writes to `run_dir/status.json` and `async-rl status` prints.

For each process it has the activity, the process that it waits for, and since when.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.files import write_whole

NORMAL_END = "ended normally"
INTERRUPTED_END = "interrupted"
"""The note on an interrupted run. The command that resumes the run follows, if there is a checkpoint."""
RUNNING = "running"
PAUSED = "paused"
"""The first word of the note on a run that its watcher has paused."""
A_PERSON = "a person: async-rl answer"
"""What a learner waits on that the watcher has paused."""
STALE_S = 30.0
"""If the status is older than this, the driver has stopped writing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The activity of one process at one moment: what it does, what it waits for, since when, and its time limit."""

    process: str = ""
    host: str = ""
    doing: str
    waits_on: str = ""
    """The process or event that `process` waits for; empty if it does not wait."""
    since_s: float
    """time.monotonic() at the start of the activity."""
    told_s: float = field(default_factory=time.monotonic)
    """time.monotonic() at the report. Both times are from the same host's clock; other hosts' clocks differ."""
    limit_s: float = 0.0
    """The time limit of the wait; 0: the process does not wait."""
    about: str = ""
    """Further information on the process, such as the sandbox of its rewards."""
    groups: int = 0
    """The number of groups in flight in a rollout process."""

    @property
    def waited_s(self) -> float:
        """Seconds from the start of the activity to the report."""
        return self.told_s - self.since_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The state of one server, also of a server that has no process."""

    name: str
    state: str
    """starting, filling, serving, draining or gone."""
    place: str
    """The address of its host, or the URL of a server that the run does not start."""
    version: int
    """The policy version of its weights; -1: not known."""
    since_s: float
    """When it got into this state, in seconds since the epoch."""


def write_status(
    run_dir: Path, statuses: Sequence[Status], note: str, alarms: str = "", servers: Sequence[ServerStatus] = ()
) -> None:
    """Replace `run_dir/status.json` by the given statuses.

    Args:
        servers: the states of the servers.
        note: the state of the whole run: `running`, `paused` and why, or how it ended.
        alarms: a description of the run's alarms; empty: there were none.
    """
    told = {"note": note, "alarms": alarms, "time_s": time.time()}
    saved = told | {
        "processes": [asdict(status) for status in statuses], "servers": [asdict(server) for server in servers],
    }
    write_whole(run_dir / "status.json", json.dumps(saved))


def goes_on(note: str) -> bool:
    """Return whether a note in a status says that the run has not ended."""
    return note == RUNNING or note.startswith(PAUSED)


def state_of(note: str, age_s: float) -> str:
    """Return the state of a run: `ended`, `running`, `paused`, or `stopped writing` if its driver was killed or hangs.

    Args:
        note: the note in the run's status.
        age_s: seconds since the status was written.
    """
    if not goes_on(note):
        return "ended"
    return "stopped writing" if age_s > STALE_S else "running" if note == RUNNING else "paused"


def format_status(run_dir: Path) -> str:
    """Return the status of a run as text. While the run goes on, it has a table with one line for each process.

    Raises:
        ConfigError: the folder has no readable status.json.
    """
    try:
        saved = json.loads((run_dir / "status.json").read_text())
        age_s, statuses = time.time() - saved["time_s"], [_known(entry) for entry in saved["processes"]]
        servers = f"\n{_table(server_table(saved))}" if saved.get("servers") else ""
        text = f"{run_dir}, {age_s:.0f} s ago: {saved['note']}\n"
    except OSError as error:
        raise ConfigError(
            f"{run_dir} has no status.json ({error.strerror}): it is not a run directory, or the run has just begun"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run_dir}/status.json can't be read ({type(error).__name__}: {error}): it is empty, half copied, or of "
            "another version of this program. Copy it again"
        ) from None
    text += f"{saved['alarms']}\n" if saved.get("alarms") else ""
    if saved["note"] == NORMAL_END or saved["note"].startswith(INTERRUPTED_END):
        return text
    before = ""
    if not goes_on(saved["note"]):
        before = "The processes before that end:\n"
    elif age_s > STALE_S:
        text += "The driver has stopped writing its status: it was killed, or hangs.\n"
        before = "The processes before that:\n"
    if not statuses:
        return text
    text += before
    rows = [("process", "host", "does", "waits on", "for", "at most")]
    for status in statuses:
        limit = f"{status.limit_s:.0f} s" if status.limit_s else "-"
        since = f"{status.waited_s:.0f} s"
        rows.append((status.process, status.host, status.doing, status.waits_on or "-", since, limit))
    about = [f"{status.process}: {status.about}\n" for status in statuses if status.about]
    return text + _table(rows) + "".join(about) + servers


def server_table(saved: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the servers in a status.json, its header first.

    Its columns are the state, the host or URL, the version of the weights, the groups in flight, and for how long the
    server has been in its state.

    Raises:
        KeyError, TypeError, AttributeError: the status has no servers that can be read.
    """
    groups = {each["process"]: each.get("groups", 0) for each in saved["processes"]}
    rows: list[tuple[str, ...]] = [("server", "state", "host or URL", "version", "groups", "for")]
    for each in saved["servers"]:
        version = str(each["version"]) if each["version"] >= 0 else "-"
        count = str(groups.get(each["name"], 0)) if each["name"].startswith("rollout") else "-"
        age = f"{max(0.0, saved['time_s'] - each['since_s']):.0f} s"
        rows.append((each["name"], each["state"], each["place"], version, count, age))
    return rows


def format_servers(run_dir: Path) -> str:
    """Return the table of the servers of a run as text.

    Raises:
        ConfigError: the folder has no readable status.json.
    """
    try:
        return _table(server_table(json.loads((run_dir / "status.json").read_text())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run_dir} has no status.json with servers ({type(error).__name__}): it is not a run directory, or the "
            "run has just begun"
        ) from None


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _known(entry: dict[str, Any]) -> Status:
    """Return a saved activity as a Status, without fields that only a newer version of this program writes."""
    names = {each.name for each in fields(Status)}
    return Status(**{name: value for name, value in entry.items() if name in names})
