"""The command `async-rl view`: its refusals with their words, and the page beside a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.view.command import open_port, shown
from async_rl.view.hosts import is_loopback, own_names, shown_name
from async_rl.view.library import check_folder
from async_rl.view.live import HEARTBEAT_S, LOOK_EVERY_S
from tests.kit.view.run_dirs import make_run

START_LIMIT_S = 60.0


def test_a_folder_that_is_no_run_names_the_runs_below_it(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine")
    with pytest.raises(ConfigError, match=r"Give one of .*runs/mine"):
        check_folder(tmp_path / "runs")


def test_an_empty_folder_a_file_and_nothing_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        check_folder(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_folder(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="got the file"):
        check_folder(tmp_path / "file")


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 can't be opened: Address already in use"):
            open_port("127.0.0.1", port)


@pytest.mark.parametrize("host, port", [("127.0.0.1", 70_000), ("no such host", 0), ("192.0.2.1", 0)])
def test_addresses_that_can_not_be_are_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"--port|--host"):
        open_port(host, port)


@pytest.mark.parametrize(
    "address, name, is_local",
    [("127.0.0.1", "localhost", True), ("127.0.0.2", "127.0.0.2", True), ("0.0.0.0", socket.gethostname(), False)],
)
def test_all_addresses_of_loopback_count_as_loopback(address: str, name: str, is_local: bool) -> None:
    with open_port(address, 0) as listener:
        assert (shown_name(listener), is_loopback(listener)) == (name, is_local)
    assert socket.gethostname() in own_names()


@pytest.mark.processes
def test_the_page_beside_a_run_ends_with_it(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shown(run_dir):
        end_s = time.monotonic() + START_LIMIT_S
        text = ""
        while "http://" not in text and time.monotonic() < end_s:
            time.sleep(0.1)
            text += capfd.readouterr().out
        port = int(text.partition("localhost:")[2].split()[0])
        with urllib.request.urlopen(f"http://localhost:{port}/run/overview", timeout=START_LIMIT_S) as answer:
            assert answer.status == 200
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://localhost:{port}/run/overview", timeout=5)


@pytest.mark.processes
def test_ctrl_c_ends_the_page_in_order_while_a_browser_follows_it(run_dir: Path) -> None:
    command = [sys.executable, "-m", "async_rl.cli", "view", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().partition("localhost:")[2].split()[0])
    with urllib.request.urlopen(f"http://localhost:{port}/run/events", timeout=START_LIMIT_S) as events:
        text = b"".join(events.readline() for _ in range(4)).decode()
        assert 'event: change\ndata: ["metrics", "status", "timeline", "journal"]' in text
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=START_LIMIT_S)
    assert (process.returncode, said) == (0, "")


def test_a_change_is_seen_well_within_two_seconds() -> None:
    assert LOOK_EVERY_S < HEARTBEAT_S
    assert LOOK_EVERY_S <= 1.0
