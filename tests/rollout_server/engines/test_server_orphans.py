"""SIGKILL of the parent at any time leaves no process of the SGLang server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.engines.orphans import ROOT, running_in, wait_until

PARENT = """
import asyncio, sys
from pathlib import Path
from rollout_server.engines.base import open_engine
from tests.kit.configs import server_config

async def main():
    engine = open_engine(server_config("sglang", Path(sys.argv[1])), 0, Path(sys.argv[2]))
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "moment",
    ["while SGLang imports", pytest.param("while its children import", marks=pytest.mark.nightly), "while it serves"],
)
def test_nothing_is_left_after_sigkill_of_the_parent(
    moment: str, model_folder: Path, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_folder), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    family = psutil.Process(parent.pid)
    try:
        if moment == "while it serves":
            assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        # The server or, later, also its scheduler, its detokenizer and Python's resource tracker.
        count = 1 if moment == "while SGLang imports" else 4
        assert wait_until(lambda: len(family.children(recursive=True)) >= count, 60)
        sessions = {os.getsid(child.pid) for child in family.children(recursive=True)}
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert os.getsid(0) not in sessions
    assert wait_until(lambda: not running_in(sessions), 20), running_in(sessions)
