"""Ctrl-C on a sweep: a first one, a second one, and cells that do not end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from async_rl.cli import main
from benchmarks.marked_command import wait_until
from tests.kit.sweeps import base_yaml

pytestmark = pytest.mark.processes


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, ends_at: int, signals: int) -> tuple[int, float]:
    """Send signals to a sweep of two cells at once, which end at signal `ends_at`; return exit code and seconds.

    The seconds are those after the last signal. The cells end after 20 s at the latest.
    """
    asked = folder / "asked"
    asked.mkdir()
    cell = folder / "cell"
    cell.write_text(
        f"#!/bin/sh\ncount=0; echo > {asked}/$$.0\n"
        f"trap 'count=$((count + 1)); echo > {asked}/$$.$count; [ $count -ge {ends_at} ] && exit 130' TERM\n"
        "for i in $(seq 400); do sleep 0.05; done\n"
    )
    cell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(cell))
    sent_s: list[float] = []

    def send() -> None:
        for number in range(signals):
            wait_until(lambda of=number: len([*asked.glob(f"*.{of}")]) == 2, 60, "both cells")  # type: ignore[misc]
            sent_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    words = ["--staleness", "0", "--seeds", "2", "--parallel", "2", f"run.dir={folder}", "timeouts.shutdown_s=1"]
    code = main(["sweep", str(base_yaml(folder)), *words])
    sender.join()
    assert {len([*asked.glob(f"*.{number}")]) for number in range(min(signals, ends_at) + 1)} == {2}
    return code, time.monotonic() - sent_s[-1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core holds one cell")
@pytest.mark.parametrize("signals", [1, 2])
def test_the_cells_of_an_interrupted_sweep_end_in_order_or_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signals: int
) -> None:
    assert interrupted(tmp_path, monkeypatch, ends_at=signals, signals=signals)[0] == 130
    assert "2 cells" in capfd.readouterr().err
