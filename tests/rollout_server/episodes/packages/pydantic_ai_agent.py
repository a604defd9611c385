"""An agent of pydantic-ai, as it is written without training: it asks, and asks again."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def solve(question: Any, base_url: str, api_key: str) -> float:
    """The reward is the share of digits in the last reply."""
    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key)))
    first = await agent.run(question.messages[-1]["content"])
    said = (await agent.run("sure?", message_history=first.all_messages())).output
    return sum(map(str.isdigit, said)) / max(1, len(said))
