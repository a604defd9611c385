"""SIGKILL of the parent of a serving vLLM server leaves none of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.rollout_server.engines.test_sglang_orphans import ROOT, running_in, wait_until
from tests.rollout_server.engines.vllm_cases import needs_vllm

PARENT = """
import asyncio, sys
from pathlib import Path
from rollout_server.engines.base import open_engine
from tests.rollout_server.engines.vllm_cases import vllm_config

async def main():
    engine = open_engine(vllm_config(Path(sys.argv[1])), 0, Path(sys.argv[2]))
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.e2e
@pytest.mark.nightly
def test_nothing_of_vllm_is_left_after_sigkill_of_the_parent(vllm_model: Path, tmp_path: Path) -> None:
    needs_vllm()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(vllm_model), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        sessions = {os.getsid(child.pid) for child in psutil.Process(parent.pid).children(recursive=True)}
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert os.getsid(0) not in sessions
    assert wait_until(lambda: not running_in(sessions), 20), running_in(sessions)
