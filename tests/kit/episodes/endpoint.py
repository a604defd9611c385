"""Lets a test reach a session through the endpoint of agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai

from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from rollout_server.episodes.tools.tool import Tool
from tests.kit.episodes.example_tools import add
from tests.kit.episodes.sessions import scripted
from tests.kit.tokenizers import end_tokens, tokenizer_of

TOKENIZER, ENDS = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
ASK = {"model": "policy", "messages": [user("hi")]}
ADD = Tool.from_function(add).schema
Use = Callable[[AgentEndpoint, OpenSession], Awaitable[None]]


def with_session(use: Use, *replies: str, generate: Any = None, **limits: int) -> Session:
    """Let `use` reach a session through the endpoint, and return the session."""

    async def run() -> Session:
        endpoint = AgentEndpoint()
        await endpoint.start()
        sizes = SessionLimits(**{"max_tokens": 1000, "max_reply_tokens": 200, "max_turns": 9, **limits})
        reader = ReplyReader(TOKENIZER, ENDS, JsonParser("hermes"))
        session = Session(generate or scripted(TOKENIZER, replies), TurnRenderer(TOKENIZER, ENDS), reader, sizes)
        try:
            await use(endpoint, endpoint.open(session))
        finally:
            await session.close()
            await endpoint.aclose()
        return session

    return asyncio.run(asyncio.wait_for(run(), 30))


def client(opened: OpenSession, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened.base_url, api_key="none", **options)


async def post(opened: OpenSession, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{opened.base_url}/chat/completions", json=body, headers=headers) as reply,
    ):
        return reply.status, await reply.json(), reply.headers
