"""The command `async-rl view`, and the page beside a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.tools.view.command import open_port, shown

START_LIMIT_S = 60.0


def test_a_port_that_is_taken_or_out_of_range_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for port in (other.getsockname()[1], 70_000):
            with pytest.raises(ConfigError, match=f"--port.*{port}"):
                open_port(port)


def test_only_this_machine_reaches_the_page() -> None:
    with open_port(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.processes
def test_the_page_beside_a_run_ends_with_it(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shown(run_dir):
        end_s = time.monotonic() + START_LIMIT_S
        text = ""
        while "http://" not in text and time.monotonic() < end_s:
            time.sleep(0.1)
            text += capfd.readouterr().out
        port = int(text.partition("localhost:")[2].split()[0])
        with urllib.request.urlopen(f"http://localhost:{port}/", timeout=START_LIMIT_S) as answer:
            assert answer.status == 200
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://localhost:{port}/", timeout=5)


@pytest.mark.processes
def test_ctrl_c_ends_the_page_in_order(run_dir: Path) -> None:
    command = [sys.executable, "-m", "async_rl.cli", "view", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().partition("localhost:")[2].split()[0])
    with urllib.request.urlopen(f"http://localhost:{port}/", timeout=START_LIMIT_S) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=START_LIMIT_S)
    assert (process.returncode, said) == (0, "")
