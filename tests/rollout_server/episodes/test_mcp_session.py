"""The session with an MCP server that all episodes share, with a made-up server whose answers the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from rollout_server.episodes.tools.mcp_server import McpServer


class MadeUpSession:
    """Every call waits until the session is closed, or until the test lets it end; a ping waits for the test."""

    def __init__(self) -> None:
        self.is_closed = asyncio.Event()
        self.may_end = {"first": asyncio.Event(), "second": asyncio.Event()}
        self.pings: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> Any:
        if tool in self.may_end:
            await self.may_end[tool].wait()
            raise ConnectionError("the server died")
        await asyncio.sleep(0.05)
        if self.is_closed.is_set():
            raise ConnectionError("the session was closed under a running call")
        return SimpleNamespace(model_dump=lambda **_: {"content": [{"type": "text", "text": "fine"}]})

    async def send_ping(self) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pings.put_nowait(answer)
        await answer


class MadeUpServer(McpServer):
    """A server whose sessions are made-up ones, kept in a list."""

    def __init__(self) -> None:
        super().__init__("mcp:made-up")
        self.sessions: list[MadeUpSession] = []

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        session = MadeUpSession()
        self.sessions.append(session)
        try:
            yield session
        finally:
            session.is_closed.set()


def test_a_late_failure_does_not_close_the_next_session() -> None:
    async def run() -> list[Any]:
        server = MadeUpServer()
        calls = [asyncio.create_task(server._call(name, {})) for name in ("first", "second")]
        while not server.sessions:
            await asyncio.sleep(0)
        (dead,) = server.sessions
        pings = []
        for event in dead.may_end.values():  # both calls fail, and each sends a ping
            event.set()
            pings.append(await dead.pings.get())
        pings[0].set_exception(ConnectionError())
        await dead.is_closed.wait()
        await asyncio.gather(calls[0], return_exceptions=True)
        calls.append(asyncio.create_task(server._call("third", {})))
        while len(server.sessions) < 2:
            await asyncio.sleep(0)
        pings[1].set_exception(ConnectionError())  # the second ping ends when the next session is open
        results = await asyncio.gather(*calls, return_exceptions=True)
        await server._close()
        return results

    *failed, fine = asyncio.run(run())
    assert [str(error) for error in failed] == ["the server died"] * 2 and fine == "fine"
