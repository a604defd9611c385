"""Reward rules: pure functions that compare a response with the reference answer, and the table that names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from typing import Any

from async_rl.errors import ConfigError
from rollout_server.rewards.math_checker import MathChecker

Rule = Callable[[str, Any], float]
"""Takes (response text, reference answer), returns 1.0 or 0.0."""

TAIL_CHARACTERS = 300
"""The number of last characters of the response in which the GSM8K rule looks for the answer."""
_MARKED_NUMBER = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
_MATH_SOURCE = re.compile(r"math|aime|amc|olympiad", re.IGNORECASE)


def gsm8k(response: str, answer: Any, *, flexible: bool = False) -> float:
    """Return 1 if the last `#### number` in the response's last 300 characters equals the answer, else 0.

    Numbers are compared: thousands separators are ignored, and 42 equals 42.0.
    Source: the answer format of GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems").

    Args:
        flexible: take the last number, whether it is marked by `####` or not.
    """
    found = (_NUMBER if flexible else _MARKED_NUMBER).findall(response[-TAIL_CHARACTERS:])
    return float(bool(found) and _number(found[-1]) == _number(str(answer)))


def math_verify(response: str, answer: Any) -> float:
    """Return 1 if math-verify finds the response's final answer equal to the reference, else 0."""
    return float(_math_checker().is_equal(response, str(answer)))


RULES: dict[str, Rule] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": partial(gsm8k, flexible=True),
    "math_verify": math_verify,
}
"""The rules by their name in `task.reward`."""


def rule_for_source(source: str) -> Rule:
    """Return the rule for rows of this `data_source` when task.reward is empty.

    A source that ends in `gsm8k` gets gsm8k; one that contains math, aime, amc or olympiad gets math_verify.

    Raises:
        ConfigError: the source is none of these. A guessed rule would train on a meaningless reward.
    """
    if source.lower().endswith("gsm8k"):
        return gsm8k
    if _MATH_SOURCE.search(source):
        return math_verify
    raise ConfigError(
        f"no reward rule belongs to data_source {source!r}. Set task.reward to one of {', '.join(RULES)}, or "
        "to a function of yours: package.module:function"
    )


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@cache
def _math_checker() -> MathChecker:
    return MathChecker()
