"""The reward of quickstart.yaml. It is called with each question and one answer to it."""

from __future__ import annotations

from rollout_server.question import Question


def letters_in_place(question: Question, response: str) -> float:
    """1 for the right word, else half of the share of its letters that stand in their place."""
    right, given = question.ground_truth, response.strip()
    if given == right:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(right, given, strict=False)) / max(len(right), len(given))
