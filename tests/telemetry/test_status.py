from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.telemetry.status import STALE_S, Status, format_status, write_status


def test_a_status_says_who_waits_on_whom_since_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = time.monotonic()
    statuses = [
        Status(process="learner/0", host="10.0.0.1", doing="waits for a batch", waits_on="buffer",
               since_s=now_s - 75, limit_s=1800),
        Status(process="rollout/0", host="10.0.0.2", doing="generates 3 groups", since_s=now_s, about="contained"),
    ]
    write_status(tmp_path, statuses, "running")
    assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{tmp_path}, \d s ago: running", lines[0])
    assert re.fullmatch(r"learner/0 10\.0\.0\.1 waits for a batch buffer 7\d s 1800 s", " ".join(lines[2].split()))
    assert re.fullmatch(r"rollout/0 10\.0\.0\.2 generates 3 groups - \d s -", " ".join(lines[3].split()))
    assert lines[4:] == ["rollout/0: contained"]


def test_a_driver_that_stopped_writing_is_reported(tmp_path: Path) -> None:
    write_status(tmp_path, [], "running")
    told = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(told | {"time_s": told["time_s"] - STALE_S - 1}))
    assert "The driver has stopped writing its status" in format_status(tmp_path)
    write_status(tmp_path, [], "ended: learner/0 died")
    assert "has stopped writing" not in format_status(tmp_path)


def test_a_paused_run_says_why_and_who_waits(tmp_path: Path) -> None:
    doing = "is paused by the watcher"
    status = Status(process="learner/0", doing=doing, waits_on="the user", since_s=time.monotonic())
    write_status(tmp_path, [status], "paused by the watcher since step 2: the KL is 12")
    text = format_status(tmp_path)
    assert "paused by the watcher since step 2: the KL is 12" in text and "is paused by the watcher" in text
    assert "before that end" not in text


def test_a_status_of_a_run_that_has_ended_shows_no_process_as_running(tmp_path: Path) -> None:
    status = Status(process="learner/0", host="10.0.0.1", doing="waits for a batch", since_s=time.monotonic())
    write_status(tmp_path, [status], "ended normally")
    assert format_status(tmp_path) == f"{tmp_path}, 0 s ago: ended normally\n"
    write_status(tmp_path, [status], "ended: learner/0 died")
    lines = format_status(tmp_path).splitlines()
    assert lines[:2] == [f"{tmp_path}, 0 s ago: ended: learner/0 died", "The processes before that end:"]
    assert lines[3].startswith("learner/0")
    write_status(tmp_path, [], "ended: KeyboardInterrupt", "Alarms: reward since step 57")
    assert format_status(tmp_path).splitlines()[1:] == ["Alarms: reward since step 57"], "it ended before any process"


@pytest.mark.parametrize("note", ["running", "ended normally"])
def test_the_alarms_of_a_run_stand_below_its_state(tmp_path: Path, note: str) -> None:
    write_status(tmp_path, [], note, "Alarms: reward since step 57")
    lines = format_status(tmp_path).splitlines()
    assert lines[:2] == [f"{tmp_path}, 0 s ago: {note}", "Alarms: reward since step 57"]
    told = json.loads((tmp_path / "status.json").read_text())
    del told["alarms"]  # a run of an earlier version has written it
    (tmp_path / "status.json").write_text(json.dumps(told))
    assert "Alarms" not in format_status(tmp_path)
