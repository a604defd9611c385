"""Files of servers that were killed are removed, and those of live ones stay, also in another container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.engines.server_process import FOLDER_PREFIX, list_shared_files, new_folder, sweep

ROOT = Path(__file__).parents[3]
MAPS_A_FILE = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
    print("mapped", flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def live_folder(temporary: Path) -> Iterator[Path]:
    """The folder of a live server, whose lock another process than this has inherited."""
    folder, lock = new_folder()
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    yield folder
    server.communicate(b"\n", timeout=30)


def dead_folder() -> Path:
    folder, lock = new_folder()
    os.close(lock)
    return folder


@pytest.mark.processes
def test_folders_of_dead_servers_are_removed_and_those_of_live_ones_stay(temporary: Path, live_folder: Path) -> None:
    dead = dead_folder()
    (dead / "socket").touch()
    (temporary / "async-rl-other").mkdir()
    (temporary / f"{FOLDER_PREFIX}starting").mkdir()  # its server has no lock yet
    sweep()
    left = {live_folder.name, "async-rl-other", f"{FOLDER_PREFIX}starting"}
    assert {path.name for path in temporary.iterdir()} == left


@pytest.mark.processes
def test_the_folder_of_a_live_server_in_another_container_stays(temporary: Path, live_folder: Path) -> None:
    dead = dead_folder()
    isolated = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("this host makes no PID namespaces")
    program = "from rollout_server.engines.server_process import sweep; sweep()"
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    subprocess.run([*isolated, sys.executable, "-c", program], env=environment, check=True, timeout=120)
    assert list(temporary.iterdir()) == [live_folder]
    assert not dead.exists()


def test_sweeps_at_the_same_time_do_not_disturb_each_other(temporary: Path) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            sweep()
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        for _ in range(10):
            dead_folder()
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    sweep()
    assert list(temporary.iterdir()) == []


def test_a_folder_of_another_user_is_not_opened(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = dead_folder()
    monkeypatch.setattr(os, "getuid", lambda: dead.stat().st_uid + 1)
    sweep()
    assert dead.exists()


@pytest.mark.processes
def test_files_in_shared_memory_go_with_the_server_that_had_mapped_them(temporary: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    for name in ("sglang_loads_own.shm", "sglang_loads_other.shm", "torch_1"):
        (shared / name).write_bytes(bytes(4096))
    dead = dead_folder()
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MAPS_A_FILE!r}, *sys.argv[1:]])"
    server = subprocess.Popen(
        [sys.executable, "-c", program, str(shared / "sglang_loads_own.shm")], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"mapped\n"
    list_shared_files(dead, server.pid, ("sglang_loads_*", "sem.mp-*"), shared)
    server.communicate(b"\n", timeout=30)
    sweep(shared)
    assert {path.name for path in shared.iterdir()} == {"sglang_loads_other.shm", "torch_1"}
    assert list(temporary.iterdir()) == []
