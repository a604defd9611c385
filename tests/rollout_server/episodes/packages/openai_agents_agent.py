"""An agent of openai-agents, as it is written without training: it asks by responses, and asks again."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(question: Any, base_url: str, api_key: str) -> float:
    """The reward is the share of digits in the last reply."""
    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="numbers", model=model)
    first = await Runner.run(agent, question.messages[-1]["content"])
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "sure?"}])
    said = str(second.final_output)
    return sum(map(str.isdigit, said)) / max(1, len(said))
