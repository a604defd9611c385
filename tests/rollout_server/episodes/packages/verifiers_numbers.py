"""A small taskset of verifiers, with a harness that runs in process: a question, and once more "sure?"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["AskTwice", "Numbers"]


class NumberData(vf.TaskData):
    answer: str = ""


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self) -> Iterator[NumberTask]:
        for number in range(20):
            yield NumberTask(NumberData(prompt=f"{number}+1?", answer=str(number + 1)), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = reply.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}]
        return vf.ProgramResult(0, "", "")
