"""Files of servers that were killed are removed, and those of live ones stay."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollout_server.engines.left_behind import FOLDER_PREFIX, SETTLE_S, sweep


@pytest.mark.processes
def test_only_old_files_that_no_process_uses_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [f"{FOLDER_PREFIX}dead", f"{FOLDER_PREFIX}live", f"{FOLDER_PREFIX}young", "async-rl-other"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "socket").touch()
    reports = [tmp_path / f"sglang_loads_{which}.shm" for which in ("dead", "live", "young")]
    for report in reports:
        report.write_bytes(bytes(mmap.PAGESIZE))
    old_s = time.time() - SETTLE_S - 1
    for path in tmp_path.iterdir():
        if "young" not in path.name:
            os.utime(path, (old_s, old_s))
    live = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path / names[1])}
    )
    with reports[1].open("r+b") as file, mmap.mmap(file.fileno(), 0):
        sweep("sglang_loads_*", shared_memory=tmp_path)
    live.communicate(b"\n", timeout=30)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[1:], reports[1].name, reports[2].name}
    sweep("sglang_loads_*", shared_memory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[2:], reports[2].name}
