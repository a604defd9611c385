"""Tool calls that the parser of an SGLang server reads: replies that it can't, and servers that don't answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from async_rl.base.errors import AsyncRLError, WaitTimeoutError
from async_rl.base.network import authorization
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import (
    Parsed,
    ReadMessage,
    ReplyReader,
    ServerParser,
    json_calls,
)
from rollout_server.episodes.conversation.session import Session, SessionLimits
from tests.kit.engines.fakes import completion
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.tokenizers import end_tokens, tokenizer_of

SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def with_parser_server(answer: Any, use: Callable[[ServerParser], Awaitable[Any]]) -> Any:
    """Let `use` have the parser of a server whose address for parsing is served by `answer`."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/parse_function_call", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await use(ServerParser(f"http://127.0.0.1:{runner.addresses[0][1]}", "glm45", (), 0.5, 0.01))
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_reply_on_which_a_servers_parser_fails_is_an_error_that_the_model_reads() -> None:
    async def answer(request: web.Request) -> web.Response:
        if not (await request.json())["text"]:
            return web.json_response({"normal_text": "", "calls": []})
        return web.Response(status=500, text="Internal Server Error")

    tokenizer = tokenizer_of("qwen2_5")

    async def use(parser: ServerParser) -> tuple[list[ReadMessage], list[str]]:
        reader = ReplyReader(tokenizer, end_tokens("qwen2_5"), parser)
        return [await reader.read(tokenizer("[TOOL_CALLS] [1]")["input_ids"], [SCHEMA]) for _ in range(2)], reader.notes

    reads, (note,) = with_parser_server(answer, use)
    message = {"role": "assistant", "content": "[TOOL_CALLS] [1]"}
    for read in reads:
        (error,) = read.errors
        assert read.message == message and "glm45" in error and "500" in error
    assert note.startswith("rollout.tool_parser ") and "glm45" in note


@pytest.mark.parametrize("status", [500, 401])  # it has no such parser, or no key was given
def test_a_server_that_does_not_or_may_not_read_replies_ends_the_run(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no key")

    with pytest.raises(AsyncRLError, match="glm45"):
        with_parser_server(answer, lambda parser: parser("x", [SCHEMA]))


def test_a_server_that_never_reads_a_reply_is_lost_and_its_reply_is_no_row() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(600)
        return web.Response()

    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    messages = [user("hi")]

    async def use(parser: ServerParser) -> Session:
        async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
            return completion([5, ends[0]])

        reader = ReplyReader(tokenizer, ends, dataclasses.replace(parser, timeout_s=0.05))
        limits = SessionLimits(max_tokens=900, max_reply_tokens=50, max_turns=1)
        session = Session(generate, TurnRenderer(tokenizer, ends), reader, limits)
        for is_retry in (False, True):  # the second one has a turn left
            with pytest.raises(WaitTimeoutError, match="glm45"):
                await session.reply(messages, [SCHEMA], is_retry=is_retry)
        return session

    session = with_parser_server(answer, use)
    assert session.num_turns == session.num_undelivered == 0 and session.rows() == []


def test_a_server_reads_calls_with_its_own_parser(sglang_server: EngineInThread) -> None:
    url, headers = sglang_server.engine.url, authorization(sglang_server.config.network)

    def read(name: str, text: str) -> Parsed:
        return sglang_server.run(ServerParser(url, name, tuple(headers.items()))(text, [SCHEMA]))

    text = 'so:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parsed = read("qwen25", text)
    assert parsed.content == "so:" and json.loads(parsed.calls[0][1]) == {"a": 1}
    assert parsed.calls == json_calls(text, "hermes").calls
    coder = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert [name for name, _ in read("qwen3_coder", coder).calls] == ["add"]
    assert read("qwen25", "It is 4.") == Parsed("It is 4.")
    lost = read("qwen25", "<tool_call>\n{\n</tool_call>")
    assert not lost.calls and lost.errors
    with pytest.raises(ValueError, match="mistral"):
        read("mistral", "[TOOL_CALLS] [1]")
