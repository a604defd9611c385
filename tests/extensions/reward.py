"""A reward from outside the packages: the length of an answer."""

from __future__ import annotations

from rollout_server.question import Question


def answer_length(question: Question, response: str) -> float:
    """Characters of the response if the question, of the task of tests/extensions/task.py, has a true answer."""
    a, b = question.messages[-1]["content"].removesuffix(" =").split(" + ")
    assert question.source == "additions" and int(a) + int(b) == int(question.ground_truth)
    return float(len(response))
