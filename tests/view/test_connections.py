"""Connections to the page: those that send half a request are closed, those that wait for an answer are not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from async_rl.view.app import make_app
from async_rl.view.connections import TimedConnection
from async_rl.view.library import Library
from async_rl.view.live import LOOK_EVERY_S
from tests.kit.view.run_dirs import append_step

LIMIT_S = 60.0
"""Until then a test waits for what it says."""
HEAD = b"GET /run/header HTTP/1.1\r\nHost: localhost\r\n"
HALVES = [b"", b"GET /run", HEAD, b"POST /run/header HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[int]:
    """Serve the page of a folder; yields the port."""
    config = uvicorn.Config(make_app(Library(folder)), log_level="error", http=TimedConnection)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        async with asyncio.timeout(LIMIT_S):
            await task


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_never_comes_whole_is_given_up(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    monkeypatch.setattr("async_rl.view.connections.REQUEST_LIMIT_S", 0.05)

    async def hold() -> bytes:
        async with served(run_dir) as port, asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            try:
                return await reader.read()
            finally:
                writer.close()

    answer = asyncio.run(hold())
    assert answer == b"" or b"HTTP/1.1 405" in answer  # POST is refused before its body has come


def test_an_answer_that_goes_on_is_not_cut(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = LOOK_EVERY_S / 2
    monkeypatch.setattr("async_rl.view.connections.REQUEST_LIMIT_S", limit_s)

    async def follow() -> None:
        async with served(run_dir) as port, asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD.replace(b"header", b"events") + b"\r\n")
            await reader.readuntil(b"event: change")
            await asyncio.sleep(3 * limit_s)
            append_step(run_dir, 13)
            await reader.readuntil(b'data: ["metrics"]')
            writer.close()

    asyncio.run(follow())
