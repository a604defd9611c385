"""A reward from outside the packages: the length of an answer."""

from __future__ import annotations

from typing import Any


def answer_length(prompt: str, response: str, answer: str, extra: dict[str, Any]) -> float:
    """Characters of the response; the arguments are checked against the task of tests/extensions/task.py."""
    a, b = prompt.removesuffix(" =<sep>").split(" + ")
    assert extra == {"data_source": "additions"} and int(a) + int(b) == int(answer)
    return float(len(response))
