"""An agent with OpenAI's SDK, as it is written without training: it asks, and asks again."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def solve(question: Any, base_url: str, api_key: str) -> float:
    """The reward is the share of digits in the last reply."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(question.messages)
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}]
    return sum(map(str.isdigit, said)) / max(1, len(said))
