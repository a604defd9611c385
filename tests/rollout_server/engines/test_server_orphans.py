"""SIGKILL of the parent at any time leaves no process of a server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.marked_command import wait_until
from tests.kit.engines.vllm import vllm

ROOT = Path(__file__).parents[3]
PARENT = """
import asyncio, sys
from pathlib import Path
from rollout_server.engines.base import open_engine
from tests.kit.configs import server_config

async def main():
    engine = open_engine(server_config(sys.argv[1], Path(sys.argv[2])), 0, Path(sys.argv[3]))
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("engine", "moment", "num_children"),
    [
        ("sglang", "while it imports", 1),
        # The server, its scheduler, its detokenizer and Python's resource tracker.
        pytest.param("sglang", "while it serves", 4, marks=pytest.mark.nightly),
        vllm("while it serves", 2),
    ],
    indirect=["engine"],
)
def test_nothing_is_left_after_sigkill_of_the_parent(
    engine: str, moment: str, num_children: int, vllm_model: Path, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, engine, str(vllm_model), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    family = psutil.Process(parent.pid)
    try:
        if moment == "while it serves":
            assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        # A child that has only been forked is still in the session of its parent.
        wait_until(
            lambda: len(found := sessions_of(family)) >= num_children and os.getsid(0) not in found, 60, "the children"
        )
        sessions = set(sessions_of(family))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert os.getsid(0) not in sessions
    wait_until(lambda: not running_in(sessions), 20, "the end of the children")


def running_in(sessions: set[int]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def sessions_of(family: psutil.Process) -> list[int]:
    return [os.getsid(child.pid) for child in family.children(recursive=True)]
