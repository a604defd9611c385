"""An agent with OpenAI's SDK and responses, as it is written without training: it asks, and asks again."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def solve(question: Any, base_url: str, api_key: str) -> float:
    """The reward is the share of digits in the last reply."""
    items: list[Any] = list(question.messages)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            response = await client.responses.create(model="policy", input=items)
            items += [*response.output, {"role": "user", "content": "sure?"}]
    said = response.output_text
    return sum(map(str.isdigit, said)) / max(1, len(said))
