"""Plays the episodes of requests with one engine, scores their answers, and logs both. It knows no buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import RewardError, WaitTimeoutError, raised_at
from async_rl.base.messages.reports import EvaluationDone
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.types import Prompt
from rollout_server.engines.base import Engine, GenerationRequest, Purpose, SampledReply
from rollout_server.engines.stop_texts import StopTexts
from rollout_server.episodes.episode import ENDS, Episode, episode_metrics
from rollout_server.episodes.players.player import open_player
from rollout_server.rewards.base import NamedReward
from rollout_server.rewards.scoring import Scoring, Verdict
from rollout_server.tasks.base import Task
from rollout_server.worker.run_eval import Evaluation
from rollout_server.worker.worker_stats import WorkerStats


class ScoredPlayer:
    """Plays a task with an engine that has started: each episode that it returns has its reward.

    It may be created in any thread; all its coroutines run in one event loop.

    Args:
        index: the index of the server in `config.server_names`.
        gold: the reward that held-out answers get besides, which is not trained on.
        logs: the folder for the output of an agent in a process of its own. None: the run's.
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
        self._player = open_player(config, tokenizer, self._generate, engine.url, log_file, self.stats.waiting)
        self.stats.about = "; ".join(f"reward {each.name}: {each.about}" for each in rewards if each.about)
        self._scoring = Scoring(config, rewards, self.stats.waiting) if rewards else None
        self._gold = Scoring(config, gold, self.stats.waiting) if gold else None
        self._evaluation = Evaluation(config, self.play, task, self.stats, self._gold_rewards if gold else None)

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play the episodes of a request, score them, and return them with rewards, unless the environment gave all.

        An episode that has no rows failed, was dropped, or got no verdict.

        Raises:
            RewardError: a reward function failed.
            AsyncRLError: the engine failed.
        """
        episodes = await self._player.play(request)
        self.log.add(episodes, request.prompt.origin, are_trained=request.purpose is Purpose.TRAINING)
        return await self._score(self._scoring, request, episodes) if self._scoring else episodes

    async def greedy_reward(self, request: GenerationRequest) -> float | None:
        """Return the reward of a greedy answer to the prompt; None unless algorithm.advantage needs it (ReMax does).

        Raises:
            RewardError: a reward failed, or there is none, because it gave no verdict or the episode failed.
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
        """Measure the held-out accuracy of the weights that the engine serves now; see Evaluation.run."""
        return await self._evaluation.run(version, beside_training=beside_training, part=part)

    def drain_metrics(self) -> list[Metric]:
        """Return the metrics of episodes and rewards since the last call, and the counts of the agents' endpoint."""
        counts = self._player.drain_counts().items()
        scoring = [each for scorer in (self._scoring, self._gold) if scorer for each in scorer.drain_metrics()]
        endpoint = [Metric(f"endpoint/{key}", count, "sum") for key, count in counts]
        return [*self.log.drain_metrics(), *endpoint, *scoring]

    def drain_notes(self) -> tuple[str, ...]:
        """Return the lines for the console since the last call."""
        return (*self.log.drain_notes(), *(f"{self.name}: {note}" for note in self._player.drain_notes()))

    async def aclose(self) -> None:
        """End what the episodes and the rewards needed. The engine goes on."""
        await self._player.aclose()
        for scoring in filter(None, (self._scoring, self._gold)):
            await scoring.aclose()

    async def _gold_rewards(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[float | None]:
        """Return the gold reward of each of a prompt's episodes; None: the reward gave no verdict.

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
        """Return the episodes with the rewards of their answers; one without rows, or out of time, gets none.

        An episode without a reward's verdict has no rows any more, and says why.
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
        """Return the engine's answers to a request.

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


_log = logging.getLogger(__name__)


class EpisodeLog:
    """Collects the metrics of a worker's episodes, and the first error of each kind as a line for the console."""

    def __init__(self, worker: str, config: Config) -> None:
        self._worker = worker
        self._has_turns = config.task.has_turns
        self._max_rows = config.rollout.max_rows
        self._episodes: list[Mapping[str, float]] = []
        """The metrics of each episode of several turns since the last call of `drain_metrics`."""
        self._noted: set[str] = set()
        """The kinds of errors that the console was told of."""
        self._notes: list[str] = []
        self.report_now = asyncio.Event()
        """Set for lines that must not come after the end of a run that they explain."""

    def add(self, episodes: Sequence[Episode], origin: str, *, are_trained: bool) -> None:
        """Add the errors of episodes to the notes and, if they are to be trained on, their metrics to the next report.

        Args:
            origin: the row of the data that the episodes belong to, in words.
            are_trained: False for held-out and greedy episodes, which would change the means of the others.
        """
        for episode in episodes:
            if self._has_turns and are_trained:
                ends = {f"end_{end}": float(episode.end == end) for end in ENDS}
                dropped_rows = max(0, len(episode.rows) - self._max_rows)
                self._episodes.append(episode.metrics | ends | {"dropped_rows": dropped_rows})
            if episode.error:
                self._note_error(episode, origin, is_trained=are_trained)

    def note(self, text: str) -> None:
        """Send a line to the console now."""
        self._notes.append(f"{self._worker}: {text}")
        self.report_now.set()

    def note_once(self, kind: str, text: str) -> bool:
        """Add a line for the console to the next report and return True, unless one of its `kind` was added before."""
        if kind in self._noted:
            return False
        self._noted.add(kind)
        self._notes.append(f"{self._worker}: {text}")
        return True

    def drain_metrics(self) -> list[Metric]:
        """Return the metrics of the episodes that were added since the last call."""
        episodes, self._episodes = self._episodes, []
        return list(episode_metrics(episodes))

    def drain_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _note_error(self, episode: Episode, origin: str, *, is_trained: bool) -> None:
        which = "an episode" if is_trained else "a held-out or greedy episode"
        said = f"{which} ended with `{episode.end}`: {episode.error} (on {origin})"
        rest = f"only counted, in episode/end_{episode.end}" if is_trained else "not shown"
        reward = " Its reward is 0." if episode.end == "error" else ""
        is_new = self.note_once(episode.error_kind, f"{said}.{reward} Further ones of this kind are {rest}")
        if is_new and episode.traceback:
            _log.warning("%s\n%s", said, episode.traceback)
