"""The rewards of a run: finds those of the configuration, scores a group's episodes, and counts calls and outcomes.

    task.reward    one reward: a name in REWARDS, or `module:name`. Empty: the task's own
    task.rewards   several, each with a name, a weight and settings; their weighted sum is the reward of an answer

`module:name` is one of two things: a function, called as `function(question, response)` with the `Question` and the
text of the response without special tokens, or a `Reward`, which declares more (rollout_server/rewards/contract.py).

    NamedReward ──► calls, one of each answer, episode or group ──► threads or tasks, with time limits ──► verdicts
                      │ verdicts that are known                                                              │
                      └────────────────────────────── VerdictCache ◄───────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from async_rl.base.config import Config, RewardConfig
from async_rl.base.config.check import check
from async_rl.base.config.section import read_params
from async_rl.base.errors import ConfigError, RewardError, first_error, shown
from async_rl.base.seams import find_entry
from async_rl.base.seams.lookup import import_object
from async_rl.base.telemetry.metrics import GROUPS, Metric
from async_rl.base.types import MAX_METRICS, MAX_NAME_CHARS, Prompt
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import (
    MAX_TASKS,
    MAX_THREADS,
    CallLimits,
    Reward,
    RewardResult,
    RewardThreads,
    Score,
    num_children,
    raised,
    read_verdict,
)

if TYPE_CHECKING:
    from rollout_server.rewards.reward_tasks import RewardTasks
    from rollout_server.rewards.verdict_cache import VerdictCache

REWARDS = {
    "gsm8k": "rollout_server.rewards.rules:GSM8K",
    "gsm8k_flexible": "rollout_server.rewards.rules:GSM8K_FLEXIBLE",
    "math_verify": "rollout_server.rewards.rules:MATH_VERIFY",
    "code": "rollout_server.rewards.code.checker:CODE",
    "judge": "rollout_server.rewards.judge:JUDGE",
    "judge_pairwise": "rollout_server.rewards.judge:JUDGE_PAIRWISE",
    "judge_listwise": "rollout_server.rewards.judge:JUDGE_LISTWISE",
}
"""The code of each built-in reward, as `module:name`, by its name in the configuration. It is imported when it is used.
"""
_COMPARING = ("judge_pairwise", "judge_listwise")
"""The rewards that compare the answers of a group."""
_ARGUMENTS = {"answer": ("question", "response"), "episode": ("question", "episode"), "group": ("question", "episodes")}
Waiting = Callable[[str, str, float], AbstractContextManager[None]]
"""Makes a context that shows a wait in the worker's status; see WorkerStats.waiting."""


class Verifier(Protocol):
    """What `open_rewards` needs of a task: its `verify` scores a response if the configuration names no reward.

    A task may also have `own_reward()`, which returns a Reward with more declarations.
    """

    def verify(self, question: Question, response: str) -> Any:
        """Return the task's own reward of a response. It must be thread-safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """One of a run's rewards, with its name, weight and limits from the configuration."""

    name: str = "task"
    weight: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of further numbers that the reward returns, by their names."""
    reward: Reward
    settings: Any = None
    timeout_s: float
    limit: str = "timeouts.reward_s"
    """Where `timeout_s` comes from, for error messages: a configuration key, or words if no key sets it."""
    concurrency: int = 0
    """The most simultaneous calls in a worker; 0: MAX_THREADS or MAX_TASKS."""
    identity: bytes = b""
    """A digest of the reward's code and settings, part of the keys of cached verdicts. Empty: verdicts are not cached.
    """
    logs_score: bool = False
    """Whether the score is logged under the reward's name. False if it is the run's only reward."""
    about: str = ""
    """What `async-rl status` says about the reward."""

    def at_once(self, function: Score) -> int:
        """Return the most simultaneous calls of the reward's function."""
        return self.concurrency or (MAX_TASKS if is_async(function) else MAX_THREADS)


def open_rewards(config: Config, task: Verifier) -> tuple[NamedReward, ...]:
    """Return the rewards that the configuration names; () if the environment or the agent gives all rewards.

    Raises:
        ConfigError: there is no such reward, it takes other arguments or settings, or it does not suit the algorithm.
    """
    return _opened(config, task, config.task.named_rewards, "task.rewards" if config.task.rewards else "task.reward")


def _opened(config: Config, task: Verifier, rewards: Sequence[RewardConfig], of: str) -> tuple[NamedReward, ...]:
    """Return the rewards with these settings.

    Args:
        of: the configuration key that lists them: `task.rewards`, or the key of a single reward.
    """
    found, is_list = [], of == "task.rewards"
    for index, each in enumerate(rewards):
        key = f"{of}[{index}]" if is_list else of
        name_key = f"{key}.reward" if is_list else of
        reward = _find_reward(each.reward, name_key) if each.reward else _own_reward(task)
        settings = _settings(reward, each, key)
        if reward.function:
            _check_arguments(reward.function, reward, settings is not None, name_key, each.reward)
        gets_greedy = config.algorithm.advantage_entry.needs_greedy_baseline and of != "eval.gold_reward"
        check(
            reward.of != "group" or not gets_greedy, name_key, each.reward,
            f"one of an answer or an episode with algorithm.advantage {config.algorithm.advantage}",
            "Its greedy answer, the baseline, has no others beside it.",
        )
        _check_evaluations(config, task, each, name_key)
        own = CallLimits(config.timeouts.reward_s, reward.concurrency)
        own = reward.limits(config, settings) if reward.limits else own
        timeout_s = each.timeout_s or own.timeout_s
        if reward.check:
            reward.check(config, settings, timeout_s, key)
        about = reward.describe(config, settings) if reward.describe else ""
        own_limit = f"{key}.timeout_s" if is_list else "its own time limit"
        found.append(NamedReward(
            name=each.name, weight=each.weight, weights=each.weights, reward=reward, settings=settings,
            timeout_s=timeout_s,
            limit="timeouts.reward_s" if timeout_s == config.timeouts.reward_s else own_limit,
            concurrency=each.concurrency or own.concurrency,
            identity=_identity(each.reward, reward, settings, config), about=about,
            logs_score=is_list,
        ))
    return tuple(found)


def _check_evaluations(config: Config, task: Verifier, of: RewardConfig, key: str) -> None:
    """Raise ConfigError if a judge compares answers but an evaluation has only one per prompt, unless its weight is 0.
    """
    compares = of.reward in _COMPARING and bool(of.weight or of.weights)
    if compares and config.eval.num_prompts and config.eval.samples_per_prompt == 1:
        prompts: list[Any] = getattr(task, "eval_prompts", list)()
        check(
            not prompts, key, of.reward, "a reward that compares no answers with eval.samples_per_prompt 1",
            f"An answer alone never gets its verdict, so none of the {len(prompts)} held-out prompts would count. Set "
            "eval.samples_per_prompt: 2 or more, or eval.num_prompts: 0.",
        )


def open_gold_reward(config: Config, task: Verifier) -> tuple[NamedReward, ...]:
    """Return the reward that eval.gold_reward names, in a tuple; () if it is empty. `task` stands for the task's own.

    Raises:
        ConfigError: there is no such reward, it does not suit the run as in `open_rewards`, it is a rule that can't
            read the right answer of a held-out question, or the environment or the agent gives the rewards.
    """
    name = config.eval.gold_reward
    if not name:
        return ()
    check(
        not config.task.gives_rewards, "eval.gold_reward", name, "empty with task.env or task.agent",
        "It scores answers to questions.",
    )
    # under a name of its own, so that its costs are kept apart from the rewards that are trained on
    gold = RewardConfig(name="eval.gold_reward", reward="" if name == "task" else name)
    found = _opened(config, task, [gold], "eval.gold_reward")
    _check_held_out(config, task)
    return found


def open_suite_rewards(config: Config, task: Verifier) -> dict[str, tuple[NamedReward, ...]]:
    """Return the reward of each benchmark in eval.suite, by its name."""
    from async_rl.base.config.suites import SUITES

    return {
        each.name: _opened(
            config, task, [RewardConfig(name=f"eval.suite.{each.name}", reward=SUITES[each.name].reward)], "eval.suite"
        )
        for each in config.eval.suite
    }


def _check_held_out(config: Config, task: Verifier) -> None:
    """Raise ConfigError if the gold reward is a rule that can't read the right answer of a held-out question."""
    from rollout_server.rewards.rules import check_reference, rule_for_source

    name = config.eval.gold_reward
    is_rule_of_source = name == "task" and bool(config.task.path)
    prompts: list[Prompt] = getattr(task, "eval_prompts", list)()
    for prompt in prompts:
        question: Question = prompt.question
        rule = rule_for_source(question.source, "eval.gold_reward") if is_rule_of_source else name
        check_reference(rule, question.ground_truth, prompt.origin)


def is_async(function: Score) -> bool:
    """Return whether a function is an `async def`, or an object with an `async def __call__`."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _own_reward(task: Verifier) -> Reward:
    """Return the reward that the task declares. If it declares none, return a reward that calls its `verify`."""
    declared: Callable[[], Reward] | None = getattr(task, "own_reward", None)
    return declared() if declared else Reward(function=task.verify, concurrency=num_children())


def _find_reward(name: str, key: str) -> Reward:
    """Return the built-in reward `name`, or import the user's Reward or function if `name` is `module:name`.

    Args:
        key: the configuration key that has the name, for error messages.
    """
    found: Any = import_object(name if ":" in name else find_entry(REWARDS, name, key), key)
    if isinstance(found, Reward):
        return found
    if not callable(found) or inspect.isclass(found):
        kind = "a class" if inspect.isclass(found) else type(found).__name__
        raise ConfigError(f"{key} {name!r} is not a function but {kind}")
    return Reward(function=found)


def _settings(reward: Reward, of: RewardConfig, key: str) -> Any:
    part = f"{of.reward or 'the reward of the task'}"
    return read_params(f"{key}.params", of.params, {part: reward.settings}).get(part)


def _identity(place: str, reward: Reward, settings: Any, config: Config) -> bytes:
    if not reward.is_function_of_input:
        return b""
    from rollout_server.rewards.verdict_cache import identity

    return identity(place, reward, settings, reward.inputs(config) if reward.inputs else None)


def _check_arguments(function: Score, reward: Reward, has_settings: bool, key: str, name: str) -> None:
    arguments, by_name = _ARGUMENTS[reward.of], {"settings": None} if has_settings else {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return
    try:
        signature.bind(*arguments, **by_name)
    except TypeError as error:
        attribute = getattr(function, "__name__", name.partition(":")[2])
        raise ConfigError(
            f"{key} {name!r} must be a `def {attribute}({', '.join((*arguments, *by_name))})`, got "
            f"{attribute}{signature}: {error}. "
            "The question has messages, ground_truth (the right answer), extra and source"
        ) from None


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
