"""Errors of agents and environments are told with class and place, and known to be the model's fault or not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from async_rl.base.errors import WeightSyncError
from rollout_server.episodes.user_code import MAX_CHARACTERS, MAX_TRACEBACK_CHARACTERS, CodeExitError, Fault

HERE = Path(__file__)
REQUEST = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")


def fault_of(function: Callable[[], Any]) -> Fault:
    try:
        function()
    except BaseException as error:
        return Fault.of(error)
    raise AssertionError("it must raise")


def raising(error: BaseException, *before: BaseException, explicitly: bool = True) -> Callable[[], None]:
    """A function that raises `error` from the last of `before`, or while handling it, and that from the one before."""

    def work() -> None:
        if not before:
            raise error
        try:
            raising(before[-1], *before[:-1], explicitly=explicitly)()
        except BaseException as cause:
            if explicitly:
                raise error from cause
            raise error  # noqa: B904

    return work


class WordyError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class BrokenError(Exception):
    """Every look at what a server answered, or at the members of a group, fails."""

    @property
    def response(self) -> Any:
        raise ValueError("no response")

    status_code = status = exceptions = response


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("plum"), "KeyError: 'plum', at "),
        (CodeExitError(SystemExit(2)), "SystemExit: 2"),
        (ExceptionGroup("of tasks", [ExceptionGroup("inner", [KeyError("plum")])]), "KeyError: 'plum'"),
        (ValueError("half \ud800"), "ValueError: half \\ud800, at "),
        (WordyError(), "WordyError: an error that can't be shown, at "),
        (BrokenError("plum"), "BrokenError: plum, at "),
    ],
)
def test_an_error_is_told_by_class_and_text(error: BaseException, said: str) -> None:
    fault = fault_of(raising(error))
    assert str(fault).startswith(said)
    assert Fault(*json.loads(json.dumps(fault))) == fault  # as it comes from the process of an agent


def test_an_error_names_the_last_line_of_the_users_own_code() -> None:
    line = 1 + test_an_error_names_the_last_line_of_the_users_own_code.__code__.co_firstlineno
    for function in (lambda: json.loads("{"), lambda: exec("1 / 0"), lambda: httpx.URL(5)):  # type: ignore[arg-type]
        assert fault_of(function).at == f"{HERE}:{line + 1}"


def test_a_long_error_is_cut() -> None:
    fault = fault_of(raising(RuntimeError("x" * 1_000_000)))
    assert len(fault.text) == MAX_CHARACTERS and len(fault.traceback) < 1.1 * MAX_TRACEBACK_CHARACTERS


@pytest.mark.parametrize(
    "before",
    [
        [KeyError("plum")], [json.JSONDecodeError("Expecting value", "", 0)], [RecursionError("of the graph")],
        [SystemExit(2)], [ExceptionGroup("of tasks", [ValueError("1"), KeyError("2")])],
        [openai.BadRequestError("bad", response=httpx.Response(400, request=REQUEST), body=None)],
    ],
)  # fmt: skip
def test_errors_that_a_reply_may_cause(before: list[BaseException]) -> None:
    assert not fault_of(raising(before[0])).is_outside
    assert not fault_of(raising(RuntimeError("of a framework"), *before)).is_outside


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space left"), TimeoutError(), MemoryError(), ImportError("no module"), NameError("x"),
        SyntaxError("invalid"), asyncio.CancelledError(), WeightSyncError("gone"), httpx.ReadTimeout(""),
        openai.RateLimitError("slow down", response=httpx.Response(429, request=REQUEST), body=None),
        httpx.HTTPStatusError("bad gateway", request=REQUEST, response=httpx.Response(502)),
        ExceptionGroup("of tasks", [ValueError("1"), ConnectionResetError()]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("explicitly", [True, False])
def test_errors_that_no_reply_causes_are_found_behind_others(error: BaseException, explicitly: bool) -> None:
    wrapped = raising(ValueError("of a framework"), error, KeyError("in between"), explicitly=explicitly)
    assert fault_of(raising(error)).is_outside and fault_of(wrapped).is_outside


def test_an_error_that_was_dealt_with_does_not_count() -> None:
    def look_up() -> None:
        try:
            raise FileNotFoundError("no cache")
        except OSError:
            raise KeyError("plum") from None

    assert not fault_of(look_up).is_outside


def test_lost_connections_of_the_http_clients_are_recognised() -> None:
    """Against a port on which nobody listens, and against a server that hangs up in the middle of its answer."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def by_openai(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=[])

    async def by_httpx(url: str) -> None:
        async with httpx.AsyncClient() as client:
            await client.get(url)

    async def by_aiohttp(url: str) -> None:
        async with aiohttp.ClientSession() as client, client.get(url):
            pass

    async def failures() -> list[Fault]:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ports = [server.sockets[0].getsockname()[1], closed.getsockname()[1]]
        found = []
        for call in (by_openai, by_httpx, by_aiohttp):
            for port in ports:
                try:
                    await call(f"http://127.0.0.1:{port}")
                except Exception as error:
                    found.append(Fault.of(error))
        server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await server.wait_closed()
        return found

    faults = asyncio.run(failures())
    assert len(faults) == 6 and all(fault.is_outside for fault in faults), faults
