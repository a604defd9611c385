"""The tools of MCP servers: `task.tools: ["mcp:http://127.0.0.1:9000/mcp", "mcp:python my_server.py"]`.

The package `mcp` must be installed (pip install mcp). If an entry is a command, each worker starts its own server. All
episodes of a worker share one session with each server, in a thread with its own event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import shlex
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.chat_messages import Schema

START_S = 60.0
"""How long a server may take to start, or to answer the first request."""
PING_S = 5.0
"""How long a server may take to answer a ping, which checks a session after an error."""
END_S = 5.0
"""How long closing a session may take."""

CallTool = Callable[..., Awaitable[str]]


class McpToolError(Exception):
    """A tool of an MCP server failed. The message comes from the server, and the model reads it."""


class McpServer:
    """An MCP server. All episodes of this process call its tools through one session.

    The first call opens the session. If the server ends, the next call opens another session.

    Args:
        name: an entry of task.tools: the server's URL or command after `mcp:`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._target = name.removeprefix("mcp:").strip()
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: asyncio.Task[Any] | None = None
        """The task that opens the session and returns it. Only the thread of `_loop` uses it."""
        self._holding: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        """Ends the task `_holding`, which keeps the session open."""

    def tools(self) -> list[tuple[Schema, CallTool]]:
        """Return (description, function that calls the tool) for each tool of the server.

        Opens a session of its own for the list of tools, and closes it. It blocks until the server has answered.

        Raises:
            ConfigError: the package `mcp` is missing, or the server can't be used.
        """
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a running event loop
            schemas = thread.submit(asyncio.run, self._list()).result()
        return [(schema, self._caller(schema["function"]["name"])) for schema in schemas]

    def close(self) -> None:
        """Close the session, and end the server if this process started it."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(END_S)
        loop.call_soon_threadsafe(loop.stop)

    async def _list(self) -> list[Schema]:
        try:
            async with asyncio.timeout(START_S) as limit, self._opened() as session:
                return [_schema(tool) async for tool in _listed(session)]
        except ConfigError:
            raise
        except (Exception, BaseExceptionGroup) as error:
            cause = _first(error)
            why = f"no answer in {START_S:g} s" if limit.expired() else f"{type(cause).__name__}: {cause}"
            raise ConfigError(f"task.tools {self._name!r}: the MCP server can't be used: {why}") from error

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        """A context with an open session. If the entry is a command, the server runs as long as the context."""
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(f"task.tools {self._name!r} needs the package mcp ({error}): pip install mcp") from error
        if self._target.startswith(("http://", "https://")):
            connection = streamable_http_client(self._target)
        else:
            command, *arguments = shlex.split(self._target)
            connection = stdio_client(StdioServerParameters(command=command, args=arguments))
        async with connection as (read, write, *_), ClientSession(read, write) as session:
            await session.initialize()
            yield session

    def _caller(self, tool: str) -> CallTool:
        async def call(**arguments: Any) -> str:
            running = asyncio.run_coroutine_threadsafe(self._call(tool, arguments), self._running_loop())
            return await asyncio.wrap_future(running)

        return call

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
                atexit.register(self.close)
            return self._loop

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return the text of its result.

        Raises:
            McpToolError: the server says that the tool failed.
        """
        if self._session is None:
            self._session = asyncio.create_task(self._open(), name=f"start of {self._name}")
        opening = self._session
        try:
            session = await asyncio.shield(opening)
            result = await session.call_tool(tool, arguments)
        except Exception:
            # While a ping runs, another call may have closed this session, and a third one opened the next.
            if self._session is opening and not await _answers(opening) and self._session is opening:
                await self._close()  # the next call begins another session
            raise
        said = result.model_dump(by_alias=True, mode="json")
        text = "\n".join(map(_text, said["content"]))
        if said.get("isError"):
            raise McpToolError(text)
        return text

    async def _open(self) -> Any:
        """Open a session and return it. A separate task keeps it open until `_end` is set."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        end = self._end = asyncio.Event()

        async def hold() -> None:
            try:
                async with self._opened() as session:
                    opened.set_result(session)
                    await end.wait()
            except (Exception, BaseExceptionGroup) as error:
                if not opened.done():
                    opened.set_exception(_first(error))

        self._holding = asyncio.create_task(hold(), name=f"session with {self._name}")
        async with asyncio.timeout(START_S):
            return await opened

    async def _close(self) -> None:
        self._session = None
        if (holding := self._holding) is not None:
            self._end.set()
            await asyncio.wait((holding,), timeout=END_S)
            holding.cancel()  # it has ended, or the server does not answer


async def _answers(opening: asyncio.Task[Any]) -> bool:
    """Return whether a session is open and its server answers."""
    try:
        session = await asyncio.shield(opening)
        async with asyncio.timeout(PING_S):
            await session.send_ping()
    except Exception:
        return False
    return True


async def _listed(session: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the server's description of each of its tools, from all pages of its list."""
    from mcp.types import PaginatedRequestParams

    cursor: str | None = None
    while True:
        listed = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        page = listed.model_dump(by_alias=True, mode="json")
        for tool in page["tools"]:
            yield tool
        cursor = page.get("nextCursor")
        if not cursor:
            return


def _schema(tool: dict[str, Any]) -> Schema:
    """Return the description of a tool in OpenAI's format."""
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}


def _text(part: dict[str, Any]) -> str:
    """Return the text of one part of a tool's result. For an image or a sound it is only its kind, e.g. `[image]`."""
    if part["type"] == "resource":
        return str(part["resource"].get("text") or f"[{part['resource']['uri']}]")
    return str(part["text"]) if part["type"] == "text" else f"[{part['type']}]"


def _first(error: BaseException) -> BaseException:
    """Return the first exception in an exception group, also in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
