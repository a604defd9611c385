"""The reward of gsm8k.yaml. It is called with each question and one answer to it."""

from __future__ import annotations

import re

from rollout_server.question import Question

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(question: Question, response: str) -> float:
    """1 if the last number of the response is the right one, else 0."""
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and _value(numbers[-1]) == _value(str(question.ground_truth)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
