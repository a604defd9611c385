"""Held-out accuracy of sampled answers, on the engine that also rolls out."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from async_rl.config import Config, EvalConfig
from async_rl.errors import RewardError
from async_rl.telemetry.metrics import Metric, Report
from async_rl.types import IntArray, Prompt
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.tasks.base import Task
from rollout_server.worker_stats import WorkerStats

CORRECT = 1 - 1e-6
"""An answer with at least this reward counts as accurate; verifiers also give partial credit."""
_SEED_OFFSET = 2**32
"""Added to run.seed: the random numbers are not those of training, and the same in every evaluation."""

Answers = Callable[[GenerationRequest], Awaitable[tuple[list[Completion], list[float]]]]


class Evaluation:
    """Runs the held-out set at the training temperature."""

    def __init__(self, config: Config, answers: Answers, task: Task, activity: WorkerStats) -> None:
        self._config = config
        self._answers = answers
        self._task = task
        self._activity = activity
        self._ids = itertools.count(-1, -1)  # negative: no group of the buffer

    async def run(self, version: int, *, beside_training: bool) -> Report:
        """`eval/accuracy` and kin over eval.size prompts with eval.samples answers each; empty without a
        held-out set.

        An answer whose reward fails counts as reward 0, and in `eval/failed`.

        Args:
            beside_training: keep no more groups in flight than training may, rollout.concurrency: all prompts at once
                would hold up what the learner waits for. With eval.pin_version a push waits for the end of the
                evaluation, which then takes all it can get.
        """
        evaluation = self._config.eval
        is_limited = beside_training and not evaluation.pin_version
        places = asyncio.Semaphore(self._config.rollout.concurrency if is_limited else max(1, evaluation.size))
        self._activity.enter_evaluation()
        try:
            prompts = await asyncio.to_thread(self._task.eval_prompts, self._config.eval.size)
            groups = await asyncio.gather(*(self._group(prompt, places) for prompt in prompts))
        finally:
            self._activity.leave_evaluation()
        answers = [(reward, length) for group in groups for reward, length, _ in group]
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
            *_version_metrics([versions for group in groups for _, _, versions in group]),
            *_at_k_metrics([[reward for reward, _, _ in group] for group in groups], evaluation),
        )
        return Report(step=version, metrics=metrics, spans=self._activity.drain())

    async def _group(self, prompt: Prompt, places: asyncio.Semaphore) -> list[tuple[float | None, int, IntArray]]:
        """(reward, tokens, token versions) of each answer; without reward if it failed."""
        rollout = self._config.rollout
        request = GenerationRequest(
            group_id=next(self._ids), prompt=prompt, start_version=0,
            seed=self._config.run.seed + _SEED_OFFSET, n=self._config.eval.samples,
            max_tokens=rollout.max_response_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
        )
        try:
            async with places:
                completions, rewards = await self._answers(request)
        except RewardError:
            return [(None, 0, np.empty(0, np.int32))] * request.n
        return [(r, len(c.tokens), c.versions) for r, c in zip(rewards, completions, strict=True)]


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Chance that k of `samples` answers, `correct` of them right, drawn without replacement hold a right one.

    The unbiased estimate of Chen et al. 2021, arXiv 2107.03374, section 2.1: 1 - C(n - c, k) / C(n, k).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def _at_k_metrics(rewards: Sequence[Sequence[float | None]], evaluation: EvalConfig) -> Iterator[Metric]:
    """pass@k for k = 2, 4, ... and n, and avg@n, the mean share of right ones, where a prompt has n > 1 answers."""
    samples = evaluation.samples
    if samples == 1:
        return
    correct = [sum(reward is not None and reward >= CORRECT for reward in group) for group in rewards]
    yield Metric(f"eval/avg_at_{samples}", sum(correct) / (samples * len(correct)))
    for k in evaluation.pass_at:
        yield Metric(f"eval/pass_at_{k}", sum(pass_at_k(c, samples, k) for c in correct) / len(correct))


def _version_metrics(versions: Sequence[IntArray]) -> Iterator[Metric]:
    """Between which versions the answers were sampled: beside training, weights may change meanwhile."""
    tokens = [v for v in versions if len(v)]
    if tokens:
        yield Metric("eval/oldest_version", float(min(int(v.min()) for v in tokens)), "min")
        yield Metric("eval/newest_version", float(max(int(v.max()) for v in tokens)), "max")
