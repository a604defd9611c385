"""Agent frameworks with tools, streamed and not: each conversation is one exact row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.episodes.endpoint import TOKENIZER, with_session
from tests.kit.episodes.example_tools import add

agents = pytest.importorskip("agents")
pydantic_ai = pytest.importorskip("pydantic_ai")

QUESTION, ANSWER = "17+25, and 1+2?", "42 and 3."
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>' for a, b in ((17, 25), (1, 2))
)


async def openai_agent(opened: OpenSession, streams: bool) -> str:
    """Play with openai-agents, by responses."""
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel("policy", AsyncOpenAI(base_url=opened.base_url, api_key="none"))
    agent = agents.Agent(name="adds", instructions="Add.", model=model, tools=[agents.function_tool(add)])
    if not streams:
        return str((await agents.Runner.run(agent, QUESTION)).final_output)
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def claude_agent(opened: OpenSession, streams: bool) -> str:
    """Play with pydantic-ai, by messages."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=opened.base_url, api_key="none")
    return await pydantic_agent(AnthropicModel("policy", provider=provider), streams)


async def chat_agent(opened: OpenSession, streams: bool) -> str:
    """Play with pydantic-ai, by chat completions."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=opened.base_url, api_key="none")
    return await pydantic_agent(OpenAIChatModel("policy", provider=provider), streams)


async def pydantic_agent(model: Any, streams: bool) -> str:
    agent = pydantic_ai.Agent(model, instructions="Add.", tools=[add])
    if not streams:
        return str((await agent.run(QUESTION)).output)
    async with agent.run_stream(QUESTION) as result:
        return str(await result.get_output())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("play", [openai_agent, claude_agent, chat_agent])
def test_a_tool_loop_of_a_framework_is_one_exact_row(
    play: Callable[[OpenSession, bool], Awaitable[str]], streams: bool
) -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        assert await play(opened, streams) == ANSWER
        assert endpoint.counts["requests"] == 2 and endpoint.counts["refused"] == 0

    session = with_session(agent, CALLS, ANSWER)
    (row,) = session.rows()
    assert TOKENIZER.decode(row.tokens[row.mask]) == f"{CALLS}<|im_end|>{ANSWER}<|im_end|>"
    assert TOKENIZER.decode(row.tokens).count("<tool_response>") == 2 and session.counts.rewritten == 0
