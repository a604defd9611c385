"""The process of a server: a port that another process took, a server that dies, and its log."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from itertools import product
from pathlib import Path

import psutil
import pytest

from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from rollout_server.engines.server_process import ServerProcess, free_port, server_seed
from tests.kit.configs import changed, server_config

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
except OSError as error:
    sys.exit(f"[Errno 98] error while attempting to bind on address: {error.strerror.lower()}")
"""


def replies(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def process(
    folder: Path, program: str, is_ready: Callable[[str], bool] = replies, startup_s: float = 60.0, **timeouts: float
) -> ServerProcess:
    config = changed(server_config("hf", folder), timeouts={"startup_s": startup_s, **timeouts})
    return ServerProcess(
        "server 0", folder / "log", config, environment=os.environ, is_ready=is_ready, hints=[("no such", "Make it.")],
        command=lambda port: [sys.executable, "-c", program, str(port)],
    )


def test_servers_and_their_starts_have_different_seeds_and_first_starts_repeat(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    first = [server_seed(seed, index, log) for seed, index in product((0, 1, 2**32 - 1), range(4))]
    assert len({*first}) == len(first) and all(0 <= seed < 2**31 for seed in first)
    assert first == [server_seed(seed, index, log) for seed, index in product((0, 1, 2**32 - 1), range(4))]
    log.write_text("the first start wrote this\n")
    assert server_seed(0, 0, log) not in first


async def start_and_close(server: ServerProcess) -> None:
    await server.start()
    server.check_alive()
    await server.aclose()


@pytest.mark.processes
def test_a_server_whose_port_was_taken_meanwhile_starts_at_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port("127.0.0.1")]
        free = f"http://127.0.0.1:{ports[1]}"
        monkeypatch.setattr("rollout_server.engines.server_process.free_port", lambda host, within: ports.pop(0))
        server = process(tmp_path, SERVER, is_ready=lambda url: url == free and replies(url))
        asyncio.run(start_and_close(server))
    assert server.url == free
    assert not replies(free)  # it has ended


@pytest.mark.processes
@pytest.mark.parametrize("chosen", ["", "/kernels"])
def test_starts_share_compiled_kernels_and_no_temporary_files(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    shows = "import os; print(os.environ['TMPDIR'], os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True)"
    for _ in range(2):
        asyncio.run(start_and_close(process(tmp_path, f"{shows}\n{SERVER}")))
    folders, kernels = zip(*map(str.split, (tmp_path / "log").read_text().splitlines()[::2]), strict=True)
    assert len({*folders}) == 2 and len({*kernels}) == 1
    assert kernels[0] == chosen if chosen else not any(Path(kernels[0]).is_relative_to(each) for each in folders)


@pytest.mark.processes
def test_a_server_that_dies_at_its_start_shows_its_log_and_a_hint(tmp_path: Path) -> None:
    server = process(tmp_path, "import sys; sys.exit('there is no such model')")
    with pytest.raises(ProcessDiedError) as failure:
        asyncio.run(start_and_close(server))
    named = ("server 0", "exit code 1", "Make it.", str(tmp_path / "log"), "there is no such model")
    assert [each for each in named if each not in str(failure.value)] == []


@pytest.mark.processes
def test_a_server_that_is_never_ready_is_ended_in_time(tmp_path: Path) -> None:
    server = process(tmp_path, SERVER, is_ready=lambda url: False, startup_s=1.0)
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.startup_s.* server 0"):
        asyncio.run(start_and_close(server))


def fails_when_it_replies(url: str) -> bool:
    if replies(url):
        raise RuntimeError("it serves another model")
    return False


@pytest.mark.processes
@pytest.mark.parametrize(
    ("is_ready", "error", "said"),
    [
        (replies, WaitTimeoutError, r"timeouts\.shutdown_s.* server 0"),
        (fails_when_it_replies, RuntimeError, "it serves another model"),
    ],
)
def test_a_server_that_is_late_to_end_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ready: Callable[[str], bool], error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    left: list[psutil.Process] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: left.extend(psutil.Process(self.pid).children()))
    program = f"import subprocess; subprocess.Popen(['sleep', '600'])\n{SERVER}"
    server = process(tmp_path, program, is_ready, shutdown_s=0.2)
    with pytest.raises(error, match=said):
        asyncio.run(start_and_close(server))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert psutil.wait_procs(left, timeout=60)[1] == [] and len(left) == 1
