"""The rules that compare a response with the right answer, and the table that names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from typing import Any

from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.code.cases import first_cheatable, read_cases
from rollout_server.rewards.math_checker import MathChecker
from rollout_server.rewards.references import (
    after_replaced_boxes,
    as_math,
    as_text,
    ends_with,
    final_answer,
    is_answer,
    is_number,
    only_boxes,
    with_marked_math,
)

Rule = Callable[[Question, str], float]
"""Takes the question and the text of a response without special tokens, returns the reward. Called in threads, many at
once."""

TAIL_CHARACTERS = 300
"""The GSM8K rule looks for the answer in so many last characters of the response."""
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
_MATH_SOURCE = re.compile(r"math|aime|amc|olympiad", re.IGNORECASE)


def gsm8k(question: Question, response: str, *, flexible: bool = False) -> float:
    """Return 1 if the last `#### number` in the response's last 300 characters is the answer, else 0.

    As in verl, one space follows `####`, and texts are compared, without commas: neither 72. nor 72.0 nor 072 is 72.
    Commas in the right answer, with which verl finds no answer right, are ignored too, and a right answer that is the
    number 72.0, as pandas makes of whole numbers, is 72.
    Source: verl/utils/reward_score/gsm8k.py, for the format of Cobbe et al. 2021, arXiv 2110.14168.

    Args:
        flexible: take the last number, marked by `####` or not, and compare values: 72.0 is 72.
    """
    found, answer = find_number("gsm8k_flexible" if flexible else "gsm8k", response), as_text(question.ground_truth)
    if flexible:
        return float(found != "" and _number(found) == _number(answer))
    return float(found != "" and found.replace(",", "") == answer.replace(",", ""))


def find_number(rule: str, response: str) -> str:
    """Return the number in a response that `rule`, of NUMBER_RULES, compares with the right answer; "" if none."""
    pattern = _MARKED_NUMBER if rule == "gsm8k" else _NUMBER
    return next(reversed(pattern.findall(response[-TAIL_CHARACTERS:])), "")


def math_verify(question: Question, response: str) -> float:
    """Return 1 if math-verify finds the response's final answer equal to the reference, else 0.

    A reference that it would misread is compared in another form; then a response may also end with its text.
    math-verify takes several boxes with words between them for one answer; here the last box alone may be the answer
    too. Nothing outside of the boxes counts then, or text before them would be a further try.
    """
    answer, response = question.ground_truth, final_answer(response)
    reference = with_marked_math(as_math(answer))
    if reference != as_text(answer) and ends_with(response, answer):
        return 1.0
    last = after_replaced_boxes(response)
    choices = [response] if last == response else [only_boxes(response), only_boxes(last)]
    return float(any(_math_checker().is_equal(with_marked_math(each), reference) for each in choices))


RULES: dict[str, Rule] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": partial(gsm8k, flexible=True),
    "math_verify": math_verify,
}
"""The rules by their name in the configuration."""
NUMBER_RULES = ("gsm8k", "gsm8k_flexible")
"""The rules whose right answer is one number."""


def rule_for_source(source: str, key: str = "task.reward") -> str:
    """Return the name of the rule for rows of this `data_source` when `key` names no reward.

    A source that ends in `gsm8k` gets gsm8k; one that contains math, aime, amc or olympiad gets math_verify.

    Raises:
        ConfigError: the source is none of these. A guessed rule would train on a meaningless reward.
    """
    if source.lower().endswith("gsm8k"):
        return "gsm8k"
    if _MATH_SOURCE.search(source):
        return "math_verify"
    raise ConfigError(
        f"no reward rule belongs to data_source {source!r}. Set {key} to one of {', '.join(RULES)}, code, or "
        "to a function of yours: package.module:function"
    )


def check_reference(rule: str, answer: Any, where: str) -> str:
    """Raise ConfigError if `rule` can't read the right answer: no number or other answer, or no tests for code.

    Returns:
        The place of the first test for code that a dishonest answer can pass; "" if there is none.
    """
    if rule == "code":
        try:
            return first_cheatable(read_cases(answer))
        except (ValueError, TypeError, SyntaxError) as error:
            raise ConfigError(f"{where}: reward_model.ground_truth must hold the tests of a program: {error}") from None
    if rule in NUMBER_RULES and not is_number(answer):
        kind = "text or a number" if not isinstance(answer, str) else "one number"
        raise ConfigError(f"{where}: reward_model.ground_truth must be {kind} for the rule {rule}, {_got(answer)}")
    if rule == "math_verify" and not is_answer(answer):
        raise ConfigError(f"{where}: reward_model.ground_truth must be an answer for the rule {rule}, {_got(answer)}")
    return ""


def _got(answer: Any) -> str:
    remedy = "Set task.columns.reference to the column that has it, correct this row or leave it out"
    return f"got {answer!r:.120}. {remedy}"


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@cache
def _math_checker() -> MathChecker:
    return MathChecker()
