"""Virtual environments with packages of others, which must not go into the project's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.marked_command import wait_until
from rollout_server.engines.server_process import free_port

ROOT = Path(__file__).parents[2]


def new_environment(folder: Path, requirements: tuple[str, ...], *, sees_ours: bool) -> Path:
    """Make a virtual environment with packages, and return its Python.

    Args:
        sees_ours: whether the packages of this environment can be imported there too.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    if sees_ours:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    without_path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip looks there, too
    done = subprocess.run(install, env=without_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return python


def environment_variables() -> dict[str, str]:
    """Variables for a process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def serving(command: Callable[[int], list[Any]], cwd: Path) -> Iterator[int]:
    """Run the command of a free port, which listens there while the block runs. Yields the port."""
    port = free_port("127.0.0.1")

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    server = subprocess.Popen(command(port), cwd=cwd)
    try:
        wait_until(listens, 120, "the server")
        yield port
    finally:
        server.kill()
        server.wait(10)
