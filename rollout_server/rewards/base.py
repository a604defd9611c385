"""The rewards of a run: the table of built-in rewards, and how the rewards of the configuration are found.

    task.reward    one reward: a name in REWARDS, or `module:name`. Empty: the task's own
    task.rewards   several, each with a name, a weight and settings; their weighted sum is the reward of an answer

`module:name` is one of two things: a function, called as `function(question, response)` with the `Question` and the
text of the response without special tokens, or a `Reward`, which declares more (rollout_server/rewards/contract.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_rl.base.config import Config, RewardConfig
from async_rl.base.config.check import check
from async_rl.base.config.section import read_params
from async_rl.base.errors import ConfigError
from async_rl.base.seams import find_entry
from async_rl.base.seams.lookup import import_object
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.contract import CallLimits, Reward, Score
from rollout_server.rewards.reward_calls import MAX_TASKS, MAX_THREADS, num_children

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
