"""The held-out evaluation: plays the held-out prompts like training prompts, and reduces rewards to metrics.

It does not depend on the buffer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import numpy as np

from async_rl.base.config import Config, EvalConfig
from async_rl.base.errors import RewardError, first_error
from async_rl.base.messages.reports import EvaluationDone, HeldOutAnswer
from async_rl.base.telemetry.metrics import SQUARED, Metric
from async_rl.base.types import IntArray, Prompt
from rollout_server.engines.base import GenerationRequest, Purpose
from rollout_server.episodes.episode import Episode
from rollout_server.tasks.base import Task
from rollout_server.worker.worker_stats import WorkerStats

_SEED_OFFSET = 2**32
"""Added to run.seed, so that evaluations use other random numbers than training. Every evaluation uses the same."""
NUM_ANSWERS = 32
"""From so many held-out prompts the end of a run chooses one, to show its answers before and after training."""
Answer = Callable[[GenerationRequest], Awaitable[list[Episode]]]
"""Plays the episodes of a request and returns them with rewards. Failed episodes have no rows."""
GoldRewards = Callable[[Prompt, Sequence[Episode]], Awaitable[list[float | None]]]
"""Returns the gold rewards of a prompt's episodes. All of them have rows. None stands for a missing verdict."""


class Evaluation:
    """The held-out evaluation. Each call of `run` answers the held-out prompts at eval.temperature and scores them."""

    def __init__(
        self, config: Config, answer: Answer, task: Task, stats: WorkerStats, gold: GoldRewards | None = None
    ) -> None:
        self._config = config
        self._answer = answer
        self._task = task
        self._stats = stats
        self._gold = gold
        self._held_out: list[Prompt] = []
        """The held-out prompts, from the first evaluation on."""
        self._numbers = itertools.count()  # of the prompts of all evaluations

    async def run(self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)) -> EvaluationDone:
        """Answer and score the held-out prompts.

        Returns `eval/accuracy` and other metrics; none if there are no prompts.

        eval.num_prompts prompts get eval.samples_per_prompt answers each. If the reward fails for one answer, all
        answers to its prompt count as reward 0, and in `eval/failed`. An answer without a verdict counts only in
        `eval/no_verdict`.

        Args:
            version: the policy version that the engine serves.
            beside_training: the learner is training meanwhile. Then at most rollout.max_groups_in_flight prompts are in
                flight, because more would delay the groups that the learner waits for. With eval.pin_version there is
                    no
                limit, because the next push waits for the evaluation.
            part: (number, count) to answer one of `count` equal parts of the prompts. The metrics of all parts, reduced
                together, are those of all prompts.
        """
        config = self._config
        is_limited = beside_training and not config.eval.pin_version
        most = config.rollout.max_groups_in_flight if is_limited else max(1, config.eval.num_prompts)
        places = asyncio.Semaphore(most)
        with self._stats.evaluating():
            held_out = self._held_out = self._held_out or await asyncio.to_thread(self._held_out_prompts)
            prompts = held_out[part[0] :: part[1]]
            groups = await self._groups(prompts, places)
            gold = await self._gold_metrics(prompts, groups)
        if not prompts:
            return EvaluationDone(version=version, spans=self._stats.drain_spans())
        judged = [[each for each in group if each is None or each.has_verdict] for group in groups]
        num_unjudged = sum(map(len, groups)) - sum(map(len, judged))
        metrics = [Metric("eval/no_verdict", num_unjudged, "sum", over_steps="last")] if num_unjudged else []
        metrics += gold
        if any(judged):
            known = {prompt.source for prompt in held_out}
            metrics += self._metrics(version, [prompt.source for prompt in prompts], judged, known)
        answers = tuple(
            HeldOutAnswer(question=prompt.question.messages[-1]["content"], answer=each.answer, reward=each.reward)
            for prompt, (each, *_) in zip(prompts[:NUM_ANSWERS], groups, strict=False)
            if each and each.rows and prompt.question.messages
        )
        spans = self._stats.drain_spans()
        return EvaluationDone(version=version, metrics=tuple(metrics), answers=answers, spans=spans)

    def _held_out_prompts(self) -> list[Prompt]:
        if not self._config.eval.suite:
            return self._task.eval_prompts()
        from rollout_server.tasks.suites import suite_prompts

        return suite_prompts(self._config, self._task)

    def _metrics(
        self, version: int, sources: Sequence[str], groups: Sequence[Sequence[Episode | None]], known: Collection[str]
    ) -> Iterator[Metric]:
        """Yield the metrics of an evaluation of at least one prompt.

        Args:
            sources: the source of each prompt.
            groups: the answers to each prompt. None stands for an answer to a prompt whose reward failed.
            known: the sources of all held-out prompts, including the prompts that other parts of the evaluation answer.
        """
        evaluation = self._config.eval
        rewards = [[episode.reward if episode and episode.rows else None for episode in group] for group in groups]
        answers = [reward for group in rewards for reward in group]
        episodes = [episode for group in groups for episode in group if episode]
        lengths = [sum(int(row.mask.sum()) for row in episode.rows) for episode in episodes if episode.rows]
        rows = [row for episode in episodes for row in episode.rows]
        scored = [reward for reward in answers if reward is not None]
        yield from (
            _mean("eval/accuracy", sum(map(evaluation.is_right, answers)), len(answers)),
            _mean("eval/reward", sum(scored), len(answers)),
            *reward_metrics(answers, evaluation),
            *([_mean("eval/response_length", sum(lengths), len(lengths))] if lengths else []),
            Metric("eval/failed", len(answers) - len(scored), "sum", over_steps="last", unit="answers"),
            Metric("eval/version", version, "last"),
            *version_metrics([row.versions[row.mask] for row in rows]),
            *at_k_metrics(rewards, evaluation),
            *prompt_metrics(sources, rewards, known, evaluation),
            *source_metrics(sources, rewards, known, evaluation),
            *(
                Metric(f"eval/reward/{name}", value, over_steps="last")
                for each in episodes for name, value in each.rewards.items()
            ),
        )

    async def _gold_metrics(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Episode | None]]
    ) -> list[Metric]:
        """Return the moments of the gold rewards and of the trained rewards of held-out answers, for the watcher.

        Answers without a gold verdict are counted, but not included in the moments. If a reward model replaces the
        task's rewards, the task's rewards are the gold rewards. The trained rewards are then unknown here, because the
        reward model is in the learner.
        """
        model = self._config.reward_model
        answered = [[episode for episode in group if episode and episode.rows] for group in groups]
        if self._gold is None:
            rule = [episode.reward for group in answered for episode in group]
            return list(_gold_moments(rule)) if model.leaves_task_out else []
        gold = await asyncio.gather(*(self._gold_of(*each) for each in zip(prompts, answered, strict=True)))
        failed = sum(len(group) for group, found in zip(answered, gold, strict=True) if found is None)
        found = [reward for rewards in gold for reward in rewards or ()]
        given = [reward for reward in found if reward is not None]
        counts = {"eval/gold_failed": failed, "eval/gold_no_verdict": len(found) - len(given)}
        counted = [Metric(key, float(count), "sum", over_steps="last") for key, count in counts.items() if count]
        return [*_gold_moments(given), *counted]

    async def _gold_of(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[float | None] | None:
        """Return the gold reward of each episode of a prompt; None instead of the list if the reward failed."""
        assert self._gold is not None
        try:
            return await self._gold(prompt, episodes) if episodes else []
        except RewardError:
            return None

    async def _groups(
        self, prompts: Sequence[Prompt], places: asyncio.Semaphore
    ) -> list[Sequence[Episode | None]]:
        """Play all prompts and return the episodes of each.

        The first error cancels the episodes that are still being played.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._group(prompt, places)) for prompt in prompts]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [group.result() for group in groups]

    async def _group(
        self, prompt: Prompt, places: asyncio.Semaphore
    ) -> Sequence[Episode | None]:
        """Return the eval.samples_per_prompt scored episodes of a prompt.

        If a reward failed, return None for each of them."""
        rollout, evaluation = self._config.rollout, self._config.eval
        sampling = evaluation.sampling(rollout)
        request = GenerationRequest(
            purpose=Purpose.EVALUATION, group_id=next(self._numbers), prompt=prompt, start_version=0,
            seed=self._config.run.seed + _SEED_OFFSET, n=evaluation.samples_per_prompt,
            max_tokens=rollout.max_response_tokens, **sampling._asdict(),
        )
        try:
            async with places:
                return await self._answer(request if sampling.temperature else request.greedy())
        except RewardError:
            return [None] * request.n


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n = `samples` answers with c = `correct` right ones.

    pass@k is the chance that k answers drawn without replacement include a right one: 1 - C(n - c, k) / C(n, k).
    Source: Chen et al. 2021, arXiv 2107.03374, section 2.1.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def at_k_metrics(rewards: Sequence[Sequence[float | None]], evaluation: EvalConfig) -> Iterator[Metric]:
    """Yield the share of right answers, and the mean pass@k for k in eval.pass_at.

    Yields nothing if eval.samples_per_prompt is 1. A prompt counts for pass@k if it has at least k answers.
    """
    if evaluation.samples_per_prompt == 1:
        return
    answers = [reward for group in rewards for reward in group]
    yield _mean(f"eval/avg_at_{evaluation.samples_per_prompt}", sum(map(evaluation.is_right, answers)), len(answers))
    yield from _pass_metrics(rewards, evaluation)


def _pass_metrics(
    rewards: Sequence[Sequence[float | None]], evaluation: EvalConfig, end: str = ""
) -> Iterator[Metric]:
    """Yield the mean pass@k of prompts with at least k answers, for k in eval.pass_at. The keys have this end."""
    correct = [(sum(map(evaluation.is_right, group)), len(group)) for group in rewards]
    for k in evaluation.pass_at:
        if chances := [pass_at_k(c, n, k) for c, n in correct if n >= k]:
            yield _mean(f"eval/pass_at_{k}{end}", sum(chances), len(chances))


def _gold_moments(gold: Sequence[float]) -> Iterator[Metric]:
    """Yield the mean, the mean square and the number of gold rewards."""
    if not gold:
        return
    for name, values in {"gold": gold, "gold_squared": [each * each for each in gold]}.items():
        yield _mean(f"eval/{name}", sum(values), len(values))
    yield Metric("eval/gold_labels", float(len(gold)), "sum", over_steps="last", unit="answers")


def reward_metrics(answers: Sequence[float | None], evaluation: EvalConfig) -> Iterator[Metric]:
    """Yield the mean reward of right answers and of wrong answers. They explain why accuracy and mean reward differ.

    An answer whose reward failed counts as wrong, with reward 0.
    """
    for key, wanted in (("eval/reward_of_right", True), ("eval/reward_of_wrong", False)):
        found = [reward or 0.0 for reward in answers if evaluation.is_right(reward) is wanted]
        if found:
            yield _mean(key, sum(found), len(found))


def source_metrics(
    sources: Sequence[str], rewards: Sequence[Sequence[float | None]], known: Collection[str], evaluation: EvalConfig
) -> Iterator[Metric]:
    """Yield the share of right answers, the mean reward and pass@k by source, for several sources or eval.suite's.

    Args:
        sources: the source of each prompt.
        rewards: the rewards of each prompt's answers.
        known: the sources of all held-out prompts.
    """
    for source, groups in _by_source(sources, rewards, known, evaluation).items():
        found = [reward for group in groups for reward in group]
        yield _mean(f"eval/accuracy/{source}", sum(map(evaluation.is_right, found)), len(found))
        yield _mean(f"eval/reward_on/{source}", sum(reward or 0.0 for reward in found), len(found))
        yield from _pass_metrics(groups, evaluation, f"/{source}")


def prompt_metrics(
    sources: Sequence[str], rewards: Sequence[Sequence[float | None]], known: Collection[str], evaluation: EvalConfig
) -> Iterator[Metric]:
    """Yield the number of prompts and the mean square of their shares of right answers, for `accuracy_intervals`.

    For the arguments see `source_metrics`.
    """
    by_source = _by_source(sources, rewards, known, evaluation)
    for end, groups in {"": rewards, **{f"/{source}": groups for source, groups in by_source.items()}}.items():
        shares = [sum(map(evaluation.is_right, group)) / len(group) for group in groups if group]
        yield Metric(f"eval/prompts{end}", float(len(shares)), "sum", over_steps="last")
        yield _mean(f"{SQUARED}{end}", sum(share * share for share in shares), len(shares))


def _by_source(
    sources: Sequence[str], rewards: Sequence[Sequence[float | None]], known: Collection[str], evaluation: EvalConfig
) -> dict[str, list[Sequence[float | None]]]:
    """Return the rewards of prompts with answers by source; {} if there is only one source, not of eval.suite."""
    found: dict[str, list[Sequence[float | None]]] = {}
    for source, group in sorted(zip(sources, rewards, strict=True), key=lambda pair: pair[0]):
        if group and (len(known) > 1 or evaluation.suite):
            found.setdefault(source, []).append(group)
    return found


def _mean(key: str, total: float, count: int) -> Metric:
    """Return the metric of a mean of `count` values.

    Its weight is `count`, so parts of an evaluation reduce to its mean.
    """
    return Metric(key, total / count, weight=count, over_steps="last")


def version_metrics(versions: Sequence[IntArray]) -> Iterator[Metric]:
    """Yield the oldest, newest and mean version of the answers' tokens.

    They differ if weights changed during the evaluation.
    """
    if versions:
        tokens = np.concatenate(versions)
        yield _mean("eval/mean_version", float(tokens.sum()), len(tokens))
        yield Metric("eval/oldest_version", float(tokens.min()), "min", over_steps="last")
        yield Metric("eval/newest_version", float(tokens.max()), "max", over_steps="last")
