"""The rollout worker: one event loop turns slots of the buffer into scored groups, hundreds of them simultaneously.

    loop     consumes           produces           waits for                 unblocked by
    admit    slots, prompts     one task per slot  a free slot               the buffer's served version
    group    one slot           a Group            the engine, the rewards   their threads
    abort    dropped group ids  a cancelled task   the buffer's late policy  a batch without the group
    report   statistics         a WorkerReport     REPORT_INTERVAL_S         the clock (EvalWorker.run)

`Worker._run_group` makes a group, from slot to buffer. `ScoredPlayer.play` samples and scores its answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import RewardError, WaitTimeoutError, first_error, raised_at
from async_rl.base.messages.reports import EvaluationDone, WorkerReport
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.telemetry.metrics import TIME, Metric
from async_rl.base.telemetry.nvml import GpuSampler
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Sample
from async_rl.base.types import Group, Prompt, Slot
from buffer.client import WorkerClient
from buffer.store_state import most_of_one_reward
from rollout_server.engines.base import Engine, GenerationRequest, Purpose, SampledReply, StopTexts
from rollout_server.episodes.episode import Episode, GroupRows, Player, SingleTurnPlayer, group_rows, question_rows
from rollout_server.rewards.scoring import NamedReward, Scoring, Verdict, open_suite_rewards
from rollout_server.tasks.base import Task
from rollout_server.worker.evaluation import Evaluation
from rollout_server.worker.worker_stats import EpisodeLog, FlatRewards, WorkerStats

WARN_AFTER_BATCHES = 2
"""The number of batches' worth of flat groups in a row that causes a warning. In a flat group all answers got the same
reward."""
REPORT_INTERVAL_S = 0.5
MOST_REPORTS_PER_S = 200.0
"""The most reports per second of all workers together. A report costs the driver 0.7 ms (benchmarks/scale.py). With
more than a hundred workers, each reports less often."""
_COUNTED = {"groups": "groups", "rows": "rows", "tokens": "tokens", "failed": "groups", "aborted": "groups"}
"""The unit of each count in a report."""


class EvalWorker:
    """The worker of an evaluation server. It evaluates with its `player` and yields reports, but uses no buffer.

    It may be created in any thread. All its coroutines run in one event loop.
    """

    def __init__(self, config: Config, player: ScoredPlayer) -> None:
        self.player = player
        self._config = config
        self._name = player.name
        self._stats = player.stats
        self._gpus = GpuSampler(self._name)
        self._report_interval_s = max(REPORT_INTERVAL_S, config.placement.num_servers / MOST_REPORTS_PER_S)
        self._is_stopped = False

    async def run(self) -> AsyncGenerator[WorkerReport]:
        """Yield a report twice a second until `stop` is called. With more than a hundred workers it is less often."""
        while not self._is_stopped:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._report_interval_s):
                    await self.player.log.report_now.wait()
            self.player.log.report_now.clear()
            yield await self._report()

    def status(self) -> Status:
        return self._stats.status()

    async def stop(self) -> None:
        """End `run`, and close what episodes and rewards opened."""
        self._is_stopped = True
        await self.player.aclose()
        self._gpus.close()

    async def _report(self) -> WorkerReport:
        """Return a report of the time since the last one: metrics, console lines, timeline spans and load samples."""
        load, now_s = await self.player.engine.load(), time.monotonic()
        occupancy = (Sample(self._name, "occupancy", now_s, load.running / load.slots),) if load and load.slots else ()
        return WorkerReport(
            metrics=tuple(self.player.drain_metrics()), notes=self.player.drain_notes(),
            spans=self._stats.drain_spans(), samples=occupancy + self._gpus.drain(),
        )


class Worker(EvalWorker):
    """The worker of a rollout server. It gets slots from the buffer and delivers a group of scored answers for each.

    It may be created in any thread. All its coroutines run in one event loop.

    Args:
        incarnation: the number of this start of the server, from 1. The buffer accepts only the newest start.
    """

    def __init__(self, config: Config, player: ScoredPlayer, buffer_address: str, incarnation: int = 1) -> None:
        super().__init__(config, player)
        self._client = WorkerClient(buffer_address, self._name, config.timeouts, config.network.keys, incarnation)
        self._wants_routing = recorded_experts(config) is not None
        self._counts: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._granted = 0
        """One more than the highest prompt index of this worker's slots."""
        prompts_per_step = config.learner.prompts_per_step
        has_answer = player.task.has_answer if not config.task.gives_rewards else lambda *_: None
        self._flat = FlatRewards(
            max(2, WARN_AFTER_BATCHES * prompts_per_step), has_answer,
            most_of_one_reward(prompts_per_step, player.task.order.num_prompts) if config.drops_zero_variance else 0,
        )
        self._group_ended = asyncio.Event()
        self._admitting: asyncio.Task[None] | None = None
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._next_id = 0
        """One more than the highest id of a started group. Later slots have higher ids."""
        self._dropped_early: set[int] = set()
        """The ids of groups that the buffer has dropped before their start. All are `_next_id` or higher."""

    async def run(self) -> AsyncGenerator[WorkerReport]:
        """Make groups until `stop` is called, and yield a report twice a second, as EvalWorker does.

        Raises:
            RewardError: task.max_failures groups in a row failed, or all episodes so far ended with an error of the
                agent. The message has the cause of the last failure.
            AsyncRLError: the engine or the buffer failed or did not answer.
        """
        self._admitting = asyncio.create_task(self._admit())
        self._admitting.add_done_callback(lambda _: self.player.log.report_now.set())
        try:
            async with aclosing(super().run()) as reports:
                async for report in reports:
                    yield report
        finally:
            await self._cancel_groups()

    async def stop(self) -> None:
        """End `run`, cancel the groups in flight, and close the connection to the buffer."""
        self._is_stopped = True
        await self._cancel_groups()
        await super().stop()
        await self._client.close()

    async def _cancel_groups(self) -> None:
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.gather(self._admitting, return_exceptions=True)

    async def _admit(self) -> None:
        """Get slots from the buffer, and make a group for each, up to rollout.max_groups_in_flight simultaneously.

        Runs until it is cancelled. If a group raises an error, all groups are cancelled, and the error is raised.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._config.staleness.on_late == "drop":
                    tasks.create_task(self._abort_dropped())
                await self._client.tell_prompts(self.player.task.order.sources)
                while True:
                    while (num_free := self._config.rollout.max_groups_in_flight - self._stats.in_flight) <= 0:
                        self._group_ended.clear()
                        await self._group_ended.wait()  # startup_s, generate_s, reward_s and buffer_s limit a group
                    slots = await self._client.admit(num_free)
                    granted_s = asyncio.get_running_loop().time()
                    # All prompts are made before the first task starts: groups that are granted together reach the
                    # engine together, which makes runs repeatable.
                    indices, make_prompt = [slot.prompt_index for slot in slots], self.player.task.prompt
                    prompts = await asyncio.to_thread(list, map(make_prompt, indices))
                    self._granted = max([self._granted, *(index + 1 for index in indices)])
                    for slot, prompt in zip(slots, prompts, strict=True):
                        self._next_id = slot.group_id + 1
                        if slot.group_id in self._dropped_early:
                            self._counts["aborted"] += 1
                            continue
                        self._stats.begin_group(slot.group_id)
                        group = tasks.create_task(self._run_group(slot, prompt, granted_s))
                        self._groups[slot.group_id] = group
                        group.add_done_callback(partial(self._on_group_end, slot.group_id))
                    self._dropped_early = {group_id for group_id in self._dropped_early if group_id >= self._next_id}
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    def _on_group_end(self, group_id: int, group: asyncio.Task[None]) -> None:
        """Count a group as ended. Called when its task ends, even if the task was cancelled before its first line."""
        del self._groups[group_id]
        self._stats.end_group(group_id)
        self._group_ended.set()

    async def _abort_dropped(self) -> None:
        """Cancel the groups that the buffer drops, with their requests to the engine, until cancelled itself.

        A dropped group that still waits for its prompt is not started.
        """
        dropped: list[int] = []
        while True:
            dropped = await self._client.aborts(dropped)
            for group_id in dropped:
                if (group := self._groups.get(group_id)) and group.cancel():
                    self._counts["aborted"] += 1
                elif group_id >= self._next_id:
                    self._dropped_early.add(group_id)

    async def _run_group(self, slot: Slot, prompt: Prompt, granted_s: float) -> None:
        """Make the group of one slot: answer its prompt, score the answers, and send the group to the buffer.

        If a reward fails, the buffer is told that the group has failed.

        Args:
            granted_s: the time when the slot was granted, by the event loop's clock.

        Raises:
            RewardError: too many groups in a row failed, see `run`.
            AsyncRLError: the engine or the buffer failed.
        """
        request = GenerationRequest(
            group_id=slot.group_id, prompt=prompt, start_version=slot.start_version,
            seed=self._config.run.seed, n=self._config.rollout.group_size,
            max_tokens=self._config.rollout.max_response_tokens,
            **self._config.rollout.sampling._asdict(), wants_support=self._config.records_support,
            wants_support_logprobs=self._config.algorithm.loss_entry.needs_heads,
            wants_routing=self._wants_routing,
        )
        try:
            episodes, baseline = await self._play(request)
            rows = self._rows(prompt, episodes)
        except RewardError as error:
            await self._fail(slot, prompt, error)
            return
        group = Group(
            group_id=slot.group_id, prompt_index=slot.prompt_index, start_version=slot.start_version,
            temperature=request.temperature, worker=self._name,
            duration_s=asyncio.get_running_loop().time() - granted_s,
            baseline_reward=baseline, keeps_kv=self._config.weight_sync.on_update == "in_place",
            data_row=prompt.data_row, messages=prompt.messages, **rows._asdict(),
        )
        with self._stats.waiting("sends", "buffer", self._config.timeouts.buffer_s):
            await self._client.put(group)
        self._failures_in_a_row = 0
        self._counts.update(groups=1, rows=len(group.rows), tokens=group.num_tokens)
        if warning := self._flat.add(prompt, episodes, self._client.flat_groups):
            if self._flat.has_only_errors:
                raise RewardError(f"{self._name}: {warning}")
            if not self._config.reward_model.path:
                self.player.log.note(warning)

    async def _play(self, request: GenerationRequest) -> tuple[list[Episode], float | None]:
        """Return the episodes of a request, and the reward of a greedy answer, or None if that is not needed.

        If one of the two fails, the other is cancelled.

        Raises:
            RewardError: a reward failed, or the greedy answer got none.
            AsyncRLError: the engine failed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = tasks.create_task(self.player.play(request))
                greedy = tasks.create_task(self.player.greedy_reward(request))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return playing.result(), greedy.result()

    def _rows(self, prompt: Prompt, episodes: Sequence[Episode]) -> GroupRows:
        """Return the trainable rows of a group. Episodes that failed, were dropped or got no verdict have no rows.

        Raises:
            RewardError: fewer episodes than config.fewest_episodes have rows.
        """
        config, errors = self._config, [episode.error for episode in episodes if not episode.rows]
        if (num_played := len(episodes) - len(errors)) < config.fewest_episodes:
            raise RewardError(
                f"{num_played} of a group's {len(episodes)} episodes could be played and scored, at least "
                f"{config.fewest_episodes} are needed. The last error: {errors[-1]}"
            )
        if not config.task.has_turns:
            return question_rows(episodes, prompt.tokens)
        return group_rows(episodes, config.task.max_prompt_tokens, config.rollout.max_rows)

    async def _fail(self, slot: Slot, prompt: Prompt, error: RewardError) -> None:
        self._counts["failed"] += 1
        self._failures_in_a_row += 1
        limit = self._config.task.max_failures
        if self._failures_in_a_row >= limit:
            raise RewardError(
                f"{limit} groups in a row failed (task.max_failures), by rewards or episodes. The last error: {error} "
                f"(on {prompt.origin})"
            ) from error
        # The prompt is not granted again: it would most likely fail the same way.
        with self._stats.waiting("sends", "buffer", self._config.timeouts.buffer_s):
            await self._client.fail(slot.group_id, str(error), requeue=False, data_row=prompt.data_row)

    async def _report(self) -> WorkerReport:
        """Return a report of the time since the last one.

        Raises:
            RewardError, AsyncRLError: `_admit` has failed, see `run`.
        """
        if self._admitting and self._admitting.done() and not self._admitting.cancelled():
            self._admitting.result()
        report = await super()._report()
        counts, self._counts = self._counts, Counter()
        task = self.player.task
        metrics = [
            *(Metric(f"rollout/{key}", counts[key], "sum", unit=unit) for key, unit in _COUNTED.items()),
            Metric("rollout/in_flight", self._stats.in_flight, by=TIME, unit="groups"),
            Metric("rollout/skipped_long_prompts", task.skipped_long, "last"),
            *self._stats.drain_groups(),
            *report.metrics,
        ]
        if self._granted:
            metrics.append(Metric("rollout/epochs", self._granted / task.num_prompts, "max", over_steps="last"))
        return replace(report, metrics=tuple(metrics))


class ScoredPlayer:
    """Plays and scores the episodes of a task with an engine that has started.

    It may be created in any thread; all its coroutines must run in one event loop.

    Args:
        index: the index of the server in `config.server_names`.
        gold: the additional reward of held-out answers, which is not trained on.
        logs: the folder for the output of an agent in a separate process. None: the run's.
    """

    def __init__(
        self, config: Config, index: int, engine: Engine, task: Task, rewards: Sequence[NamedReward], tokenizer: Any,
        gold: Sequence[NamedReward] = (), logs: Path | None = None,
    ) -> None:
        self.name = config.server_names[index]
        self.engine = engine
        self.task = task
        self.stats = WorkerStats(self.name)
        self.log = EpisodeLog(self.name, config)
        self._config = config
        self._stop = StopTexts(config.rollout.stop, tokenizer) if config.rollout.stop else None
        log_file = (logs or config.run_dir / "logs") / f"agent-{index}.log"
        self._player = self._open_player(tokenizer, log_file)
        self.stats.about = "; ".join(f"reward {each.name}: {each.about}" for each in rewards if each.about)
        self._scoring = Scoring(config, rewards, self.stats.waiting) if rewards else None
        self._gold = Scoring(config, gold, self.stats.waiting) if gold else None
        self._of_suite = {
            name: Scoring(config, found, self.stats.waiting) for name, found in open_suite_rewards(config, task).items()
        }
        """The scoring of each benchmark in eval.suite, by its name."""
        self._evaluation = Evaluation(config, self.play, task, self.stats, self._gold_rewards if gold else None)

    def _open_player(self, tokenizer: Any, log_file: Path) -> Player:
        if not self._config.task.has_turns:
            return SingleTurnPlayer(tokenizer, self._generate)
        from rollout_server.episodes.multi_turn import MultiTurnPlayer

        return MultiTurnPlayer(
            self._config, tokenizer, self._generate, self.engine.url, log_file, self.stats.waiting
        )

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play the episodes of a request and score them, unless the environment has given all rewards.

        An episode without rows failed, was dropped, or got no verdict.

        Raises:
            RewardError: a reward function failed.
            AsyncRLError: the engine failed.
        """
        episodes = await self._player.play(request)
        self.log.add(episodes, request.prompt.origin, are_trained=request.purpose is Purpose.TRAINING)
        is_held_out = request.purpose is Purpose.EVALUATION
        scoring = self._of_suite.get(request.prompt.source, self._scoring) if is_held_out else self._scoring
        return await self._score(scoring, request, episodes) if scoring else episodes

    async def greedy_reward(self, request: GenerationRequest) -> float | None:
        """Return the reward of a greedy answer to the prompt; None if algorithm.advantage needs none (only ReMax does).

        Raises:
            RewardError: a reward failed, gave no verdict, or the episode failed.
        """
        if not self._config.algorithm.advantage_entry.needs_greedy_baseline:
            return None
        (episode,) = await self.play(replace(request, purpose=Purpose.BASELINE, n=1).greedy())
        if not episode.rows:
            raise RewardError(f"the greedy answer has no reward: {episode.error}")
        return episode.reward

    async def evaluate(
        self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)
    ) -> EvaluationDone:
        """Measure the held-out accuracy of the weights that the engine serves now.

        For the arguments see Evaluation.run.
        """
        return await self._evaluation.run(version, beside_training=beside_training, part=part)

    def drain_metrics(self) -> list[Metric]:
        """Return new metrics since the last call: of episodes, of rewards, and counts of the agents' endpoint."""
        counts = self._player.drain_counts().items()
        scorers = (self._scoring, self._gold, *self._of_suite.values())
        scoring = [each for scorer in scorers if scorer for each in scorer.drain_metrics()]
        endpoint = [Metric(f"endpoint/{key}", count, "sum") for key, count in counts]
        return [*self.log.drain_metrics(), *endpoint, *scoring]

    def drain_notes(self) -> tuple[str, ...]:
        """Return the new lines for the console since the last call."""
        return (*self.log.drain_notes(), *(f"{self.name}: {note}" for note in self._player.drain_notes()))

    async def aclose(self) -> None:
        """Close what episodes and rewards opened. The engine continues to run."""
        await self._player.aclose()
        for scoring in filter(None, (self._scoring, self._gold, *self._of_suite.values())):
            await scoring.aclose()

    async def _gold_rewards(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[float | None]:
        """Return the gold reward of each episode of a prompt; None for an episode without a verdict.

        Raises:
            RewardError: the reward failed.
        """
        assert self._gold is not None
        try:
            verdicts = await self._gold.score(prompt.question, episodes)
        except RewardError as error:
            self.log.note_once(
                "eval.gold_reward", f"eval.gold_reward failed: {error} (on {prompt.origin}). The answers have no gold "
                "reward. Further failures are only counted (eval/gold_failed)",
            )  # fmt: skip
            raise
        return [verdict.reward for verdict in verdicts]

    async def _score(
        self, scoring: Scoring, request: GenerationRequest, episodes: list[Episode]
    ) -> list[Episode]:
        """Score the episodes and return them with their rewards. Episodes without rows, or out of time, are not scored.

        If a reward gives no verdict on an episode, the returned episode has no rows, and its `error` says why.
        """
        is_partial = self._config.task.on_timeout == "partial"
        can_be_scored = [e.rows and e.end != "error" and (e.end != "timeout" or is_partial) for e in episodes]
        try:
            scored = list(itertools.compress(episodes, can_be_scored))
            verdicts = iter(await scoring.score(request.prompt.question, scored))
        except RewardError as error:
            cause = error.__cause__ or error
            self.log.note_once(
                f"{type(cause).__name__} {raised_at(cause)}",
                f"a reward failed: {error} (on {request.prompt.origin}). Its group is dropped; in an evaluation the "
                "answer counts as wrong. Further errors of this kind are only counted (rollout/failed)",
            )
            raise
        return [
            self._rewarded(e, next(verdicts), request) if can else e
            for e, can in zip(episodes, can_be_scored, strict=True)
        ]

    def _rewarded(self, episode: Episode, verdict: Verdict, request: GenerationRequest) -> Episode:
        if verdict.reward is not None:
            given = {"env": episode.reward} if self._config.task.gives_rewards else {}
            return episode.with_reward(verdict.reward, given | verdict.values)
        self.log.note_once(
            verdict.reason.partition(":")[0],
            f"{verdict.reason} (on {request.prompt.origin}). The answer is left out of its group. Further ones are "
            "only counted (scoring/<reward>/no_verdict)",
        )
        return replace(episode, rows=(), error=verdict.reason, has_verdict=False)

    async def _generate(self, request: GenerationRequest) -> list[SampledReply]:
        """Return the engine's replies to a request.

        Raises:
            WaitTimeoutError: the engine has not answered within timeouts.generate_s.
        """
        timeout_s = self._config.timeouts.generate_s
        try:
            with self.stats.waiting("generates", "its engine", timeout_s):
                async with asyncio.timeout(timeout_s) as limit:
                    replies = await self.engine.generate(request)
            if self._stop:
                replies = [self._stop.cut(reply) for reply in replies]
            return replies
        except TimeoutError:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"{self.name} waited {timeout_s:.0f} s (timeouts.generate_s) for the "
                f"{self._config.rollout.engine} engine to answer request {request.key}"
            ) from None
