"""An endpoint like OpenAI's in place of a judge, and configurations of rewards that ask it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from async_rl.base.config import Config
from rollout_server.question import Question
from rollout_server.rewards.scoring import Scoring, Verdict, open_rewards
from tests.kit.rewards import QUESTION, of, told

Answer = Callable[[dict[str, Any]], web.Response | str | Awaitable[web.Response | str]]
"""Returns a response, or the text of a reply, to the body of a chat completion."""


class FakeJudge:
    """A judge that answers as told, and remembers what it was asked."""

    def __init__(self, answer: Answer, latency_s: float = 0.0) -> None:
        self.answer = answer
        self.latency_s = latency_s
        self.model = "judge-7b"
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._at_once = 0

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback; yields the base address."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.latency_s)
            answered = self.answer(body)
            if isinstance(answered, Awaitable):
                answered = await answered
        finally:
            self._at_once -= 1
        if isinstance(answered, web.Response):
            return answered
        return web.json_response({
            "choices": [{"message": {"role": "assistant", "content": answered}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        })  # fmt: skip


def score(value: float) -> str:
    """The reply of a judge that gives this score."""
    return json.dumps({"reason": "so", "score": value})


def in_turn(*answers: web.Response | str) -> Answer:
    """Answers one after the other, and the last one for ever."""
    rest = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda body: next(rest)


def judged_by(url: str, reward: str = "judge", params: dict[str, Any] | None = None, **judge: Any) -> Config:
    """A run with one reward of a judge."""
    return of({"reward": reward, "params": params or {}}, judge={"urls": (url,), **judge})


async def verdicts(config: Config, *answers: str, question: Question = QUESTION) -> list[Verdict]:
    """The verdicts on a group of answers."""
    return (await verdicts_and_counts(config, *answers, question=question))[0]


async def verdicts_and_counts(
    config: Config, *answers: str, question: Question = QUESTION
) -> tuple[list[Verdict], dict[str, float]]:
    """The verdicts on a group of answers, and what scoring it has counted."""
    scoring = Scoring(config, open_rewards(config, None))  # type: ignore[arg-type]
    try:
        found = await scoring.score(question, [told(answer) for answer in answers])
        return found, {metric.key: metric.value for metric in scoring.drain_metrics()}
    finally:
        await scoring.aclose()
