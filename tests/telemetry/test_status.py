from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.status import (
    INTERRUPTED_END,
    NORMAL_END,
    STALE_S,
    ServerStatus,
    Status,
    format_servers,
    format_status,
    state_of,
    write_status,
)
from async_rl.cli import main
from tests.kit.view.client import Client


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


def test_a_driver_that_stopped_writing_is_reported_until_it_has_ended(tmp_path: Path) -> None:
    write_status(tmp_path, [], "running")
    fresh = format_status(tmp_path)
    told = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(told | {"time_s": told["time_s"] - STALE_S - 1}))
    assert len(format_status(tmp_path).splitlines()) == len(fresh.splitlines()) + 1
    assert state_of("ended: learner/0 died", STALE_S + 1) == "ended"


def test_a_status_of_a_run_that_has_ended_shows_no_process_as_running(tmp_path: Path) -> None:
    status = Status(process="learner/0", host="10.0.0.1", doing="waits for a batch", since_s=time.monotonic())
    write_status(tmp_path, [status], NORMAL_END)
    assert "learner/0" not in format_status(tmp_path)
    write_status(tmp_path, [status], "ended: it failed")
    first, before, _, learner = format_status(tmp_path).splitlines()
    assert first.endswith("ended: it failed") and learner.startswith("learner/0") and before
    write_status(tmp_path, [], "ended: KeyboardInterrupt")
    assert len(format_status(tmp_path).splitlines()) == 1, "it ended before any process"
    write_status(tmp_path, [status], f"{INTERRUPTED_END}; resume with: async-rl train --resume {tmp_path}")
    assert format_status(tmp_path).rstrip().endswith(f"--resume {tmp_path}"), "and no process"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"processes": []}', '{"processes": [], "servers": [{}]}'])
def test_a_status_without_servers_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        format_servers(tmp_path)


def test_servers_status_and_page_show_the_same_of_every_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ["rollout/0", "serving", "10.0.0.2", "7", "3", "75 s"],
        ["rollout/1", "draining", "http://10.0.0.3:30000", "6", "2", "5 s"],
        ["rollout/2", "starting", "no host", "-", "0", "3600 s"],
        ["eval/0", "serving", "10.0.0.2", "4", "-", "80 s"],
    ]
    run_dir, now_s = tmp_path / "run", time.monotonic()
    run_dir.mkdir()
    processes = [
        Status(process=name, doing="generates", since_s=now_s, groups=groups)
        for name, groups in (("rollout/0", 3), ("rollout/1", 2), ("eval/0", 0))
    ]
    servers = [
        ServerStatus(name=name, state=state, place=place, version=int(version.replace("-", "-1")), since_s=0.0)
        for name, state, place, version, *_ in rows
    ]
    write_status(run_dir, processes, "running", servers=servers)
    saved = json.loads((run_dir / "status.json").read_text())
    for server, row in zip(saved["servers"], rows, strict=True):
        server["since_s"] = saved["time_s"] - float(row[-1].removesuffix(" s"))
    (run_dir / "status.json").write_text(json.dumps(saved))
    header = ["server", "state", "host or URL", "version", "groups", "for"]
    for command in ("servers", "status"):
        assert main([command, str(run_dir)]) == 0
        shown = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
        assert shown[-5:] == [header, *rows], command
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", Client(run_dir).get("./").text)
    assert [*header, *(cell for row in rows for cell in row)] == cells[cells.index("server") :][:30]


@pytest.mark.parametrize("servers", [[{}], ["x"], [{"name": 0, "version": 1}], 7])
def test_a_page_of_a_status_whose_servers_are_damaged_is_shown(servers: object, tmp_path: Path) -> None:
    write_status(tmp_path, [], "running")
    saved = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(saved | {"servers": servers}))
    assert Client(tmp_path).get("./").status_code == 200
