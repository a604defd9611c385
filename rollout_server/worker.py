"""The rollout worker: one event loop in which hundreds of slots become scored rollout groups at the same time.

    loop     consumes           produces           waits for                 unblocked by
    admit    slots, prompts     one task per slot  a free slot               the buffer's served version
    group    one slot           a RolloutGroup     the engine, the rewards   their threads
    abort    dropped group ids  a cancelled task   the buffer's late policy  a batch without the group
    report   statistics         a WorkerReport     REPORT_INTERVAL_S         the clock
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from async_rl.config import Config
from async_rl.errors import RewardError, WaitTimeoutError, raised_at
from async_rl.messages.reports import EvaluationDone, WorkerReport
from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.nvml import GpuSampler
from async_rl.telemetry.status import Status
from async_rl.telemetry.timeline import Sample
from async_rl.types import Prompt, Rollout, RolloutGroup, Slot
from buffer.client import WorkerClient
from rollout_server.engines.base import Completion, Engine, GenerationRequest
from rollout_server.flat_rewards import FlatRewards
from rollout_server.rewards.base import Reward, num_threads
from rollout_server.rewards.reward_threads import RewardThreads
from rollout_server.run_eval import Evaluation
from rollout_server.tasks.base import Task
from rollout_server.worker_stats import WorkerStats

REPORT_INTERVAL_S = 0.5
FLAT_BATCHES = 2
"""The servers warn when they have generated so many batches of groups in a row without a difference in reward."""
_GREEDY_TEMPERATURE = 1e-4
"""Temperature of the greedy answer. Engines treat 0 differently; here a token 1e-3 nats behind the best has e^-10."""
_BASELINE_IDS = -(2**32)
"""The greedy answer of group g has the request id _BASELINE_IDS - g, which no group and no evaluation has."""
_COUNTED = ("groups", "rollouts", "tokens", "failed", "aborted")


class Worker:
    """Makes scored groups of the buffer's slots with one engine, and sends them back. Create it in its event loop."""

    def __init__(
        self, config: Config, index: int, engine: Engine, task: Task, reward: Reward, tokenizer: Any,
        buffer_address: str,
    ) -> None:
        self._config = config
        self._name = f"rollout/{index}"
        self._engine = engine
        self._task = task
        self._reward = reward
        self._tokenizer = tokenizer
        self._client = WorkerClient(buffer_address, self._name, config.timeouts, config.network.keys)
        self._threads = RewardThreads(config.timeouts.reward_s, num_threads(config))
        self._stats = WorkerStats(self._name)
        self._gpus = GpuSampler(self._name)
        self._evaluation = Evaluation(config, self._answer, task, self._stats)
        self._needs_greedy_baseline = config.algorithm.advantage_entry.needs_greedy_baseline
        self._counts: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._failure_kinds: set[tuple[str, str]] = set()
        """(type, place) of the errors that rewards have raised."""
        self._notes: list[str] = []
        """Lines for the console that were not reported yet."""
        self._report_now = asyncio.Event()
        """Set for notes, which must not come after the end of a run that they explain."""
        batches = FLAT_BATCHES * config.learner.prompts_per_step / config.placement.rollout.servers
        self._flat = FlatRewards(max(2, round(batches)), self._text, task.has_answer)
        self._group_ended = asyncio.Event()
        self._is_stopped = False
        self._admitting: asyncio.Task[None] | None = None
        self._groups: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> AsyncIterator[WorkerReport]:
        """Roll out until `stop` is called, and yield a report twice a second.

        Raises:
            RewardError: task.max_failures groups in a row failed. The message has the cause of the last failure.
            AsyncRLError: the engine or the buffer does not answer.
        """
        self._admitting = asyncio.create_task(self._admit())
        self._admitting.add_done_callback(lambda _: self._report_now.set())
        try:
            while not self._is_stopped:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._report_now.wait(), REPORT_INTERVAL_S)
                self._report_now.clear()
                if self._admitting.done() and not self._admitting.cancelled():
                    self._admitting.result()
                yield await self._report()
        finally:
            await self._cancel_groups()

    def status(self) -> Status:
        return self._stats.status()

    async def evaluate(self, version: int, *, beside_training: bool) -> EvaluationDone:
        """Measure the held-out accuracy of the weights that the engine serves now; see Evaluation.run."""
        return await self._evaluation.run(version, beside_training=beside_training)

    async def stop(self) -> None:
        """End `run`, cancel the groups in flight, and close the connection to the buffer."""
        self._is_stopped = True
        await self._cancel_groups()
        await self._client.close()
        self._threads.close()
        self._gpus.close()

    async def _cancel_groups(self) -> None:
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.gather(self._admitting, return_exceptions=True)

    async def _admit(self) -> None:
        """Get slots from the buffer and run a task for each, rollout.concurrency at once. One that raises ends all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._config.staleness.late == "drop":
                    tasks.create_task(self._abort_dropped())
                while True:
                    while (num_free := self._config.rollout.concurrency - self._stats.in_flight) <= 0:
                        self._group_ended.clear()
                        await self._group_ended.wait()  # generate_s, reward_s and wire_s limit the time of a group
                    slots = await self._client.admit(num_free)
                    granted_s = time.monotonic()
                    # All prompts are made before the first task starts: groups that are granted together reach the
                    # engine together, which makes runs repeatable.
                    prompts = await asyncio.to_thread(list, map(self._task.prompt, [s.prompt_index for s in slots]))
                    for slot, prompt in zip(slots, prompts, strict=True):
                        begun = self._stats.begin_group()
                        group = tasks.create_task(self._run_group(slot, prompt, granted_s))
                        self._groups[slot.group_id] = group
                        group.add_done_callback(partial(self._on_group_end, slot.group_id, begun))
        except BaseExceptionGroup as group:
            raise _first_error(group) from None

    def _on_group_end(self, group_id: int, begun: tuple[float, float], group: asyncio.Task[None]) -> None:
        """Count the group of an ended task as ended, so also one whose task was cancelled before it ran any code."""
        del self._groups[group_id]
        self._stats.end_group(begun)
        self._group_ended.set()

    async def _abort_dropped(self) -> None:
        """Keep asking the buffer which groups it has dropped, and cancel them, which ends their engine requests too."""
        dropped: list[int] = []
        while True:
            dropped = await self._client.aborts(dropped)
            for group_id in dropped:
                if (group := self._groups.get(group_id)) and group.cancel():
                    self._counts["aborted"] += 1

    async def _run_group(self, slot: Slot, prompt: Prompt, granted_s: float) -> None:
        request = GenerationRequest(
            group_id=slot.group_id, prompt=prompt, start_version=slot.start_version,
            seed=self._config.run.seed, n=self._config.rollout.group_size,
            max_tokens=self._config.rollout.max_response_tokens,
            temperature=self._config.rollout.temperature, top_p=self._config.rollout.top_p,
        )
        try:
            (completions, rewards), baseline = await asyncio.gather(
                self._answer(request), self._greedy_reward(request)
            )
        except RewardError as error:
            await self._fail(slot, error)
            return
        if not self._config.reward_model.path and (warning := self._flat.add(prompt, completions, rewards)):
            self._notes.append(f"{self._name}: {warning}")
            self._report_now.set()
        group = RolloutGroup(
            group_id=slot.group_id, prompt_index=slot.prompt_index, start_version=slot.start_version,
            temperature=request.temperature, prompt_tokens=prompt.tokens,
            rollouts=tuple(map(_make_rollout, completions, rewards)),
            duration_s=time.monotonic() - granted_s, worker=self._name, baseline_reward=baseline,
            keeps_kv=self._config.weight_sync.on_update == "in_place",
        )
        with self._stats.waiting("sends", "buffer", self._config.timeouts.wire_s):
            await self._client.put(group)
        self._failures_in_a_row = 0
        self._counts.update(groups=1, rollouts=request.n, tokens=group.num_tokens)

    async def _greedy_reward(self, request: GenerationRequest) -> float | None:
        """Sample a greedy answer to the prompt, return its reward; None unless the advantage needs it (ReMax does)."""
        if not self._needs_greedy_baseline:
            return None
        greedy = dataclasses.replace(
            request, group_id=_BASELINE_IDS - request.group_id, n=1, temperature=_GREEDY_TEMPERATURE, top_p=1.0
        )
        return (await self._answer(greedy))[1][0]

    async def _answer(self, request: GenerationRequest) -> tuple[list[Completion], list[float]]:
        """Have the engine sample the answers and the reward threads score them; return (completions, rewards)."""
        timeout_s = self._config.timeouts.generate_s
        try:
            with self._stats.waiting("generates", "its engine", timeout_s):
                async with asyncio.timeout(timeout_s) as limit:
                    completions = await self._engine.generate(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"{self._name} waited {timeout_s:.0f} s (timeouts.generate_s) for the "
                f"{self._config.rollout.engine} engine to answer group {request.group_id}"
            ) from None
        calls = [partial(self._score, request.prompt, completion) for completion in completions]
        try:
            with self._stats.waiting("scores", "its reward", self._threads.limit_s(len(calls))):
                return completions, await self._threads.run(calls)
        except RewardError as error:
            self._note_failure(error)
            raise

    def _score(self, prompt: Prompt, completion: Completion) -> float:
        return self._reward(prompt, self._text(completion))

    def _text(self, completion: Completion) -> str:
        return str(self._tokenizer.decode(completion.tokens, skip_special_tokens=True))

    def _note_failure(self, error: RewardError) -> None:
        """Note an error for the console, unless one of its type, raised at the same line of code, was noted before."""
        cause = error.__cause__ or error
        kind = (type(cause).__name__, raised_at(cause))
        if kind not in self._failure_kinds:
            self._failure_kinds.add(kind)
            self._notes.append(
                f"{self._name}: a reward failed: {error}. Its group is dropped; in an evaluation the answer counts as "
                "wrong. Further errors of this kind are only counted (rollout/failed)"
            )

    async def _fail(self, slot: Slot, error: RewardError) -> None:
        self._counts["failed"] += 1
        self._failures_in_a_row += 1
        limit = self._config.task.max_failures
        if self._failures_in_a_row >= limit:
            raise RewardError(
                f"the rewards of {limit} groups in a row failed (task.max_failures). The last error: {error}"
            ) from error
        # The prompt is not granted again: it would most likely fail the same way.
        with self._stats.waiting("sends", "buffer", self._config.timeouts.wire_s):
            await self._client.fail(slot.group_id, str(error), requeue=False)

    async def _report(self) -> WorkerReport:
        """Return the report of the time since the last one: counts, console lines, timeline spans and load samples."""
        load, now_s = await self._engine.load(), time.time()
        occupancy = (Sample(self._name, "occupancy", now_s, load.running / load.slots),) if load and load.slots else ()
        counts, self._counts = self._counts, Counter()
        metrics = [
            *(Metric(f"rollout/{key}", counts[key], "sum") for key in _COUNTED),
            Metric("rollout/in_flight", self._stats.in_flight),
            Metric("rollout/skipped_long_prompts", self._task.skipped_long, "last"),
            *self._stats.drain_groups(),
        ]
        notes, self._notes = tuple(self._notes), []
        return WorkerReport(
            metrics=tuple(metrics), notes=notes, spans=self._stats.drain_spans(),
            samples=occupancy + self._gpus.drain(),
        )


def _make_rollout(completion: Completion, reward: float) -> Rollout:
    return Rollout(
        tokens=completion.tokens, logprobs=completion.logprobs, versions=completion.versions,
        mask=np.ones(len(completion.tokens), dtype=np.bool_), reward=reward,
        finish_reason=completion.finish_reason,
    )


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in the group or, if that is a group too, the first one in it, and so on."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
