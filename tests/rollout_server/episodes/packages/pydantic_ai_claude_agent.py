"""An agent of pydantic-ai that speaks Anthropic's messages, as it is written without training."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider


async def solve(question: Any, base_url: str, api_key: str) -> float:
    """The reward is the share of digits in the last reply. The second one is streamed."""
    agent = Agent(AnthropicModel("policy", provider=AnthropicProvider(base_url=base_url, api_key=api_key)))
    first = await agent.run(question.messages[-1]["content"])
    async with agent.run_stream("sure?", message_history=first.all_messages()) as second:
        said = await second.get_output()
    return sum(map(str.isdigit, said)) / max(1, len(said))
