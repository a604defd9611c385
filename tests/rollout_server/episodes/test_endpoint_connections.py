"""The endpoint of agents with clients that vanish, dawdle, send random bytes, or do not speak HTTP."""

from __future__ import annotations

import asyncio
import json
import logging

import aiohttp
import pytest
from aiohttp import web

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.engines.fakes import completion
from tests.kit.episodes.endpoint import ASK, ENDS, post, with_session


async def at_once(tokens: list[int], max_tokens: int) -> SampledReply:
    return completion([5, ENDS[0]])


async def connected(opened: OpenSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = opened.base_url.removeprefix("http://").partition("/")[0].partition(":")
    return await asyncio.open_connection(host, int(port))


def head(opened: OpenSession, length: int) -> bytes:
    path = "/s/" + opened.base_url.partition("/s/")[2]
    return f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_that_can_not_be_written_is_not_received_and_no_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The end of a connection may be noticed only when the reply is written to it."""

    async def broken(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(web.StreamResponse, "write", broken)
            patch.setattr(web.StreamResponse, "write_eof", broken)
            patch.setattr(web.Response, "write_eof", broken)
            _, writer = await connected(opened)
            body = json.dumps({**ASK, "stream": stream}).encode()
            writer.write(head(opened, len(body)) + body)
            while not opened.session.num_undelivered:
                await asyncio.sleep(0)
            while opened.num_running:
                await asyncio.sleep(0)
            writer.close()
        assert opened.error is None and opened.session.num_undelivered == 1
        assert (await post(opened, ASK))[0] == 200

    with caplog.at_level(logging.INFO):
        session = with_session(agent, generate=at_once)
    assert session.num_turns == len(session.rows()) == session.counts.joined == 1 and caplog.records == []


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_no_depth_of_nesting_is_an_error_of_the_endpoint(name: str) -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with aiohttp.ClientSession() as http:
            for depth in range(860, 1010, 10):
                value = "[" * depth + "]" * depth
                if name == "tools":
                    value = '[{"type": "function", "function": {"name": "f", "parameters": ' + value + "}}]"
                data = json.dumps(ASK)[:-1] + f', "{name}": {value}}}'
                async with http.post(f"{opened.base_url}/chat/completions", data=data) as reply:
                    assert reply.status in (200, 400), depth
        assert opened.error is None

    with_session(agent, generate=at_once, max_turns=10_000)
