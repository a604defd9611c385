"""The ends of a vLLM server: when its parent is killed, and when its engine is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from async_rl.errors import ProcessDiedError, WeightSyncError
from rollout_server.engines.vllm.admin import VLLMAdmin
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.orphans import ROOT, running_in, wait_until
from tests.kit.engines.replies import generate, request_for
from tests.kit.engines.vllm import START_S, needs_vllm

PARENT = """
import asyncio, sys
from pathlib import Path
from rollout_server.engines.base import open_engine
from tests.kit.engines.vllm import server_config

async def main():
    engine = open_engine(server_config("vllm", Path(sys.argv[1])), 0, Path(sys.argv[2]))
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


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_server_ends_when_its_engine_dies_while_a_push_waits_for_it(vllm_model: Path, tmp_path: Path) -> None:
    """vLLM would wait for the end of the push's request, which never comes, and the run with it."""
    needs_vllm()
    server = EngineInThread(server_config("vllm", vllm_model), tmp_path)
    try:
        server.run(server.engine.start(), START_S)
        admin = VLLMAdmin(server.config, server.engine.url)
        admin.pause("in_place")
        with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor() as threads:  # no store answers there
            place = {"host": "127.0.0.1", "port": mute.getsockname()[1], "backend": "gloo"}
            joining = threads.submit(admin.join_group, name="g", first_rank=1, world_size=2, **place)
            mute.accept()
            for child in psutil.Process(server.engine._server._process.pid).children(recursive=True):
                if "EngineCore" in " ".join(child.cmdline()):
                    child.kill()
            with pytest.raises(WeightSyncError, match="is the rollout server still alive"):
                joining.result(60)
        with pytest.raises(ProcessDiedError, match=r"ended by itself \(exit code 1\)"):
            generate(server, request_for(1))
    finally:
        server.close()
