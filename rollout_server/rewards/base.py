"""Reward rules, pure functions of response and reference; `open_reward` picks the one a run uses."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from async_rl.config import Config
from async_rl.errors import ConfigError, raised_at
from async_rl.types import Prompt
from rollout_server.rewards.math_checker import MathChecker, num_children
from rollout_server.rewards.reward_threads import MAX_THREADS

if TYPE_CHECKING:
    from rollout_server.tasks.base import Question, Task

Reward = Callable[[Prompt, str], float]
"""(prompt, response text without special tokens) -> reward. Runs in threads; raising fails the group."""
Rule = Callable[[str, Any], float]
"""(response text, reference answer) -> 1.0 or 0.0."""

TAIL_CHARACTERS = 300
"""The GSM8K rule looks for the answer in the response's last characters only."""
_MARKED_NUMBER = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
_MATH_SOURCE = re.compile(r"math|aime|amc|olympiad", re.IGNORECASE)


def gsm8k(response: str, answer: Any, *, flexible: bool = False) -> float:
    """1 when the last `#### number` of the response's tail equals the answer as a number, else 0.

    `flexible`: the last number counts, marked or not. Thousands separators are ignored, and 42 equals 42.0.
    Source: the answer format of GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems").
    """
    found = (_NUMBER if flexible else _MARKED_NUMBER).findall(response[-TAIL_CHARACTERS:])
    return float(bool(found) and _number(found[-1]) == _number(str(answer)))


def math_verify(response: str, answer: Any) -> float:
    """1 when math-verify finds the response's final answer equal to the reference, else 0."""
    return float(_math_checker().is_equal(response, str(answer)))


RULES: dict[str, Rule] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": partial(gsm8k, flexible=True),
    "math_verify": math_verify,
}


def rule_for_source(source: str) -> Rule:
    """The rule for rows of this `data_source` when task.reward is empty.

    A name ending in `gsm8k` gets gsm8k; one with math, aime, amc or olympiad in it math_verify. Raises
    ConfigError for any other: guessing a rule would train on a meaningless reward.
    """
    if source.lower().endswith("gsm8k"):
        return gsm8k
    if _MATH_SOURCE.search(source):
        return math_verify
    raise ConfigError(
        f"no reward rule belongs to data_source {source!r}. Set task.reward to one of {', '.join(RULES)}, or "
        "to a function of yours: package.module:function"
    )


def open_reward(config: Config, task: Task) -> Reward:
    """The reward that `task.reward` names; empty: the task's own verifier. ConfigError when there is none."""
    name = config.task.reward
    if not name:
        return lambda prompt, response: task.verify(prompt.reference, response)
    if name in RULES:
        rule = RULES[name]
        return lambda prompt, response: rule(response, prompt.reference.answer)
    return partial(_call_custom, _import_function(name))


def num_threads(config: Config) -> int:
    """That score answers at once. A function of the user's may wait for other machines; a rule of this project computes
    and may need a math-verify process, which its thread must find free: waiting would count as scoring.
    """
    return MAX_THREADS if ":" in config.task.reward else num_children()


def _call_custom(function: Callable[..., float], prompt: Prompt, response: str) -> float:
    question: Question = prompt.reference
    extra = {**question.extra, "data_source": question.source}
    return function(prompt.text, response, question.answer, extra)


def _import_function(name: str) -> Callable[..., float]:
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(module_name.split(".")):
        matches = difflib.get_close_matches(name, RULES, n=1, cutoff=0.5)
        raise ConfigError(
            f"task.reward must be one of {', '.join(RULES)} or package.module:function, got {name!r}."
            + (f" Did you mean {matches[0]}?" if matches else "")
        )
    if os.getcwd() not in sys.path:  # an installed command does not look where the user stands
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        at = raised_at(error)
        place = f", at {at}" if at and not at.startswith(__file__) else ""
        raise ConfigError(
            f"task.reward {name!r} can't be imported from {os.getcwd()}: {type(error).__name__}: {error}{place}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        file = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"task.reward {name!r}: {file} defines no {attribute}")
    if not callable(function):
        raise ConfigError(f"task.reward {name!r} is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@cache
def _math_checker() -> MathChecker:
    return MathChecker()
