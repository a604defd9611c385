"""Scores the episodes of a group with all rewards of the run, and counts the calls and their outcomes.

    NamedReward ──► calls, one of each answer, episode or group ──► threads or tasks, with time limits ──► verdicts
                      │ verdicts that are known                                                              │
                      └────────────────────────────── VerdictCache ◄───────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, RewardError, first_error, shown
from async_rl.base.telemetry.metrics import GROUPS, Metric
from async_rl.base.types import MAX_METRICS, MAX_NAME_CHARS
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.base import NamedReward, is_async
from rollout_server.rewards.contract import RewardResult, Score, read_verdict
from rollout_server.rewards.reward_calls import RewardThreads, raised

if TYPE_CHECKING:
    from rollout_server.rewards.reward_tasks import RewardTasks
    from rollout_server.rewards.verdict_cache import VerdictCache

Waiting = Callable[[str, str, float], AbstractContextManager[None]]
"""Makes a context that shows a wait in the worker's status; see WorkerStats.waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The combined verdict of all rewards on one episode."""

    reward: float | None
    """The weighted sum of the scores. None: a reward with a weight gave no verdict."""
    values: dict[str, float] = field(default_factory=dict)
    """The scores by reward name, and the rewards' metrics as <reward>/<metric>."""
    reason: str = ""
    """Why there is no verdict, as a sentence."""


class Scoring:
    """Scores the answers of one worker. It may be created in any thread; its coroutines must run in one event loop.

    Args:
        waiting: makes a context that shows a wait, entered while a reward is opened and while it scores a group.
    """

    def __init__(
        self, config: Config, rewards: Sequence[NamedReward], waiting: Waiting = lambda *_: nullcontext()
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._cache: VerdictCache | None = None
        if config.run_dir.is_dir() and any(each.reward.is_function_of_input for each in rewards):
            from rollout_server.rewards.verdict_cache import VerdictCache

            self._cache = VerdictCache(config.run_dir)
        self._rewards = [_Scorer(config, each, self._cache) for each in rewards]

    async def score(self, question: Question, episodes: Sequence[Episode]) -> list[Verdict]:
        """Score the episodes of one group with all rewards simultaneously. Returns one verdict per episode.

        Raises:
            RewardError: a reward failed.
        """
        if not episodes:
            return []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(each, question, episodes)) for each in self._rewards]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        by_reward = [task.result() for task in tasks]
        return [self._verdict(results) for results in zip(*by_reward, strict=True)]

    def drain_metrics(self) -> list[Metric]:
        """Return the number, outcomes and duration of each reward's calls since the last time, as metrics."""
        return [metric for each in self._rewards for metric in each.drain_metrics()]

    async def aclose(self) -> None:
        """Close everything that the rewards opened."""
        for each in self._rewards:
            await each.aclose()
        if self._cache:
            await asyncio.to_thread(self._cache.close)

    async def _score(self, reward: _Scorer, question: Question, episodes: Sequence[Episode]) -> list[RewardResult]:
        waits_on = f"its reward {reward.named.name}" if reward.named.logs_score else "its reward"
        await reward.open(partial(self._waiting, f"opens {waits_on} for", waits_on))
        with self._waiting("scores", waits_on, reward.limit_s(len(episodes))):
            return await reward.score(question, episodes)

    def _verdict(self, results: Sequence[RewardResult]) -> Verdict:
        """Combine the results of all rewards for one episode into a verdict."""
        total, values, missing = 0.0, dict[str, float](), ""
        for scorer, result in zip(self._rewards, results, strict=True):
            named = scorer.named
            values |= _keyed(named.name, result.metrics)
            if result.score is None:
                if named.weight or any(named.weights.values()):
                    missing = f"the reward {named.name} gave no verdict" + (result.reason and f": {result.reason}")
                continue
            total += named.weight * result.score + _weighted(named, result)
            if named.logs_score:
                values[named.name] = result.score
        beside_env = self._config.task.gives_rewards
        if len(values) > (most := MAX_METRICS - beside_env):
            names = ", ".join(scorer.named.name for scorer in self._rewards)
            beside = ", beside the reward `env` of the environment or agent" if beside_env else ""
            raise RewardError(
                f"the rewards ({names}) may log at most {most} numbers of an answer{beside}, got {len(values)}"
            )
        return Verdict(reward=None if missing else total, values=values, reason=missing)


class _Scorer:
    """Scores with one reward, within its limits. `open` opens the reward's function once."""

    def __init__(self, config: Config, named: NamedReward, cache: VerdictCache | None) -> None:
        self.named = named
        self._config = config
        self._cache = cache if named.reward.is_function_of_input else None
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._calls: RewardThreads | RewardTasks | None = None
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        """The counts of the verdicts themselves."""
        self._seconds: list[float] = []
        if named.reward.function:
            self._take(named.reward.function)

    async def open(self, waiting: Callable[[float], AbstractContextManager[None]]) -> None:
        """Open what the reward needs, unless that is done already. A simultaneous second call waits for the first.

        Args:
            waiting: makes a context, from the time limit in seconds, that is entered meanwhile.

        Raises:
            RewardError: opening failed. The message names the reward if the run has several.
            ConfigError: the reward's `open` raised it.
        """
        if self._calls is None:
            limit_s = self._config.timeouts.startup_s
            with self._counting_failures(), waiting(limit_s):
                await self._open(limit_s)

    async def _open(self, limit_s: float) -> None:
        """Open what the reward needs within `limit_s`, including the wait for a simultaneous call."""
        from rollout_server.episodes.user_code import ForeignCode

        foreign = ForeignCode()  # the tasks that it creates continue: they belong to the open reward
        try:
            async with asyncio.timeout(limit_s) as limit, self._opening:
                if self._calls is None:
                    self._take(await foreign.call(self._entered, limit_s, "opening the reward"))
        except (ConfigError, RewardError):
            raise
        except Exception as error:
            if limit.expired():
                late = f"the reward took longer than timeouts.startup_s = {limit_s:g} s to open what it needs"
                raise RewardError(late) from None
            raise raised(error) from error
        finally:
            await foreign.end_cancelled_calls()

    async def _entered(self) -> Score:
        """Enter the reward's `open`, and return the function that it yields."""
        assert self.named.reward.open is not None, "a reward has a function, or opens one"
        return await self._opened.enter_async_context(self.named.reward.open(self._config, self.named.settings))

    def _take(self, function: Score) -> None:
        """Make `function` the one that scores, and set up the threads or tasks that call it."""
        named = self.named
        has_settings = named.settings is not None and named.reward.function is not None
        self._function = partial(function, settings=named.settings) if has_settings else function
        if named.reward.of == "group":
            self._function = _listing(self._function, is_async(function))
        limits = (named.timeout_s, named.at_once(function), named.limit)
        if is_async(function):
            from rollout_server.rewards.reward_tasks import RewardTasks

            self._calls = RewardTasks(*limits)
        else:
            self._calls = RewardThreads(*limits)

    def limit_s(self, num_episodes: int) -> float:
        """Return the time limit in seconds for scoring `num_episodes` more episodes; see `time_limit_s`."""
        assert self._calls is not None
        return self._calls.limit_s(1 if self.named.reward.of == "group" else num_episodes)

    async def score(self, question: Question, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Score the episodes of one group. Returns one verdict per episode.

        Raises:
            RewardError: a call failed. The message names the reward if the run has several.
        """
        of = self.named.reward.of
        with self._counting_failures():
            if of == "group":
                ((results,), began_s) = await self._run([partial(self._function, question, list(episodes))])
                verdicts = list(map(read_verdict, results))
            elif of == "episode":
                results, began_s = await self._run([partial(self._function, question, each) for each in episodes])
                verdicts = list(map(read_verdict, results))
            else:
                return await self._score_answers(question, [episode.answer for episode in episodes])
        self._count(verdicts, verdicts, began_s)
        return verdicts

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """A context that counts a RewardError, and adds the reward's name to its message if the run has several."""
        try:
            yield
        except RewardError as error:
            self._counts["failed"] += 1
            if self.named.logs_score:
                raise RewardError(f"{self.named.name}: {error}") from (error.__cause__ or error)
            raise

    async def _score_answers(self, question: Question, answers: Sequence[str]) -> list[RewardResult]:
        """Score answers. Cached verdicts are reused, and equal answers are scored once."""
        if not self._cache:
            results, began_s = await self._run([partial(self._function, question, answer) for answer in answers])
            verdicts = list(map(read_verdict, results))
            self._count(verdicts, verdicts, began_s)
            return verdicts
        keys = [self._cache.key(self.named.identity, question, answer) or index.to_bytes(4) for index, answer in
                enumerate(answers)]  # fmt: skip
        is_plain = all(len(key) > 4 for key in keys)
        known = await asyncio.to_thread(self._cache.get, keys) if is_plain else {}
        missing = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in known}
        results, began_s = await self._run([partial(self._function, question, each) for each in missing.values()])
        new = dict(zip(missing, map(read_verdict, results), strict=True))
        self._counts["cached"] += len(answers) - len(missing)
        if is_plain and new:
            verdicts_on = {key: (missing[key], verdict) for key, verdict in new.items()}
            await asyncio.to_thread(self._cache.put, self.named.name, question, verdicts_on)
        found = [(known | new)[key] for key in keys]
        self._count(found, list(new.values()), began_s)
        return found

    async def _run(self, calls: list[Callable[[], Any]]) -> tuple[list[Any], float]:
        """Run the calls. Returns (their results, the time when they began)."""
        assert self._calls is not None
        began_s = time.monotonic()
        self._counts["calls"] += len(calls)
        return await self._calls.run(calls), began_s

    def _count(self, verdicts: Sequence[RewardResult], new: Sequence[RewardResult], began_s: float) -> None:
        for name, number in (item for verdict in new for item in verdict.counts.items()):
            self._sums[name] = self._sums.get(name, 0.0) + number
        self._counts["no_verdict"] += sum(verdict.score is None for verdict in verdicts)
        self._seconds.append(time.monotonic() - began_s)

    def drain_metrics(self) -> list[Metric]:
        counts, self._counts = self._counts, Counter()
        seconds, self._seconds = self._seconds, []
        of = f"scoring/{self.named.name}"
        sums, self._sums = self._sums, {}
        metrics = [Metric(f"{of}/{name}", number, "sum") for name, number in {**sums, **counts}.items()]
        if seconds:
            mean_s = sum(seconds) / len(seconds)
            metrics.append(Metric(f"{of}/group_s", mean_s, weight=len(seconds), by=GROUPS, unit="s"))
        return metrics

    async def aclose(self) -> None:
        if self._calls is not None:
            self._calls.close()
        await self._opened.aclose()


def _keyed(reward: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a reward under the names with which they are logged: <reward>/<metric>.

    Raises:
        RewardError: a name is longer than the buffer accepts.
    """
    keyed = {f"{reward}/{name}": value for name, value in metrics.items()}
    if long := [key for key in keyed if len(key) > MAX_NAME_CHARS]:
        raise RewardError(
            f"the reward {reward} must give its metrics names of at most {MAX_NAME_CHARS} characters, with {reward}/ "
            f"before them, got {len(long[0])}: {long[0]:.200}"
        )
    return keyed


def _weighted(named: NamedReward, result: RewardResult) -> float:
    """Return the weighted sum of the numbers that a reward returns besides its score.

    Raises:
        RewardError: a number that has a weight is missing.
    """
    if absent := sorted(named.weights.keys() - result.metrics.keys()):
        raise RewardError(
            f"the reward {named.name} must return {', '.join(absent)} besides its score, as its `weights` in "
            f"task.rewards say, got {', '.join(result.metrics) or 'no other number'}"
        )
    return sum(weight * result.metrics[name] for name, weight in named.weights.items())


def _listing(function: Score, is_async: bool) -> Score:
    """Wrap the function of a group reward so that it returns a list.

    A generator's code then runs within the call's limits.
    """

    async def listed_later(question: Question, episodes: list[Episode]) -> list[Any]:
        return _of_all(await function(question, episodes), len(episodes))

    def listed(question: Question, episodes: list[Episode]) -> list[Any]:
        return _of_all(function(question, episodes), len(episodes))

    return listed_later if is_async else listed


def _of_all(results: Any, size: int) -> list[Any]:
    """Return the verdicts of a group reward as a list of `size` items, one per episode."""
    try:
        verdicts = iter(() if isinstance(results, Mapping | Set) else results)  # these have no order
    except TypeError:
        verdicts = iter(())
    found = list(verdicts)
    if len(found) != size:
        raise RewardError(f"the reward of a group must return a list of {size} verdicts, got {shown(results)}")
    return found
