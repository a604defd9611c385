"""Held-out accuracy of sampled answers, on the engine that also rolls out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from async_rl.config import Config
from async_rl.errors import RewardError
from async_rl.metrics import Metric, Report
from async_rl.types import Prompt
from rollout_server.activity import Activity
from rollout_server.engine import Completion, GenerationRequest
from rollout_server.tasks import Task

CORRECT = 1 - 1e-6
"""An answer with at least this reward counts as accurate; verifiers also give partial credit."""
_SEED_OFFSET = 2**32
"""Added to run.seed: the random numbers are not those of training, and the same in every evaluation."""

Answers = Callable[[GenerationRequest], Awaitable[tuple[list[Completion], list[float]]]]


class Evaluation:
    """Runs the held-out set at the training temperature."""

    def __init__(self, config: Config, answers: Answers, task: Task, activity: Activity) -> None:
        self._config = config
        self._answers = answers
        self._task = task
        self._activity = activity
        self._ids = itertools.count(-1, -1)  # negative: no group of the buffer

    async def run(self, version: int) -> Report:
        """`eval/accuracy` and kin over eval.size prompts with eval.samples answers each; empty without a
        held-out set.

        An answer whose reward fails counts as reward 0, and in `eval/failed`.
        """
        self._activity.enter_evaluation()
        try:
            prompts = await asyncio.to_thread(self._task.eval_prompts, self._config.eval.size)
            groups = await asyncio.gather(*map(self._group, prompts))
        finally:
            self._activity.leave_evaluation()
        answers = [answer for group in groups for answer in group]
        if not answers:
            return Report(step=version, spans=self._activity.drain())
        rewards, lengths = zip(*answers, strict=True)
        scored = [reward for reward in rewards if reward is not None]
        metrics = (
            Metric("eval/accuracy", sum(reward >= CORRECT for reward in scored) / len(rewards)),
            Metric("eval/reward", sum(scored) / len(rewards)),
            Metric("eval/response_length", sum(lengths) / len(lengths)),
            Metric("eval/failed", len(rewards) - len(scored), "sum"),
            Metric("eval/version", version, "last"),
        )
        return Report(step=version, metrics=metrics, spans=self._activity.drain())

    async def _group(self, prompt: Prompt) -> list[tuple[float | None, int]]:
        """(reward, tokens) of each answer."""
        rollout = self._config.rollout
        request = GenerationRequest(
            group_id=next(self._ids), prompt=prompt, start_version=0,
            seed=self._config.run.seed + _SEED_OFFSET, n=self._config.eval.samples,
            max_tokens=rollout.max_response_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
        )
        try:
            completions, rewards = await self._answers(request)
        except RewardError:
            return [(None, 0)] * request.n
        lengths = (len(completion.tokens) for completion in completions)
        return list(zip(rewards, lengths, strict=True))
