"""Scores answers with reasoning_gym's scorers in this process, and knows which of them only compare answers."""

from __future__ import annotations

from typing import Any

from reasoning_gym.dataset import ProceduralDataset

from rollout_server.question import Question

_COMPARING = frozenset({
    "ab", "chain_sum", "circuit_logic", "color_cube_rotation", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "game_of_life_halting", "needle_haystack", "number_format",
    "palindrome_generation", "path_star", "products", "self_reference", "sentence_reordering", "spell_backward",
    "zebra_puzzles",
})  # fmt: skip
"""Datasets of reasoning_gym 0.1.25 whose own scorers only compare an answer, as the inherited scorer does. Other
scorers may execute an answer, or compute for ever, for example 10 ** int(answer)."""


def only_compares(name: str, dataset: Any) -> bool:
    """Return whether a dataset's scorer only compares an answer, and never executes it."""
    return name in _COMPARING or type(dataset).score_answer is ProceduralDataset.score_answer


def score_here(dataset: Any, question: Question, answer: str) -> float | str:
    """Score an answer with the dataset's scorer. Returns the score, or as text why the scorer can't read the answer.

    Raises:
        Exception: the scorer can't read the right answer either.
    """
    entry = entry_of(question)
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception as error:
        # Some scorers do not catch what a wrong answer raises, e.g. int("abc") in prime_factorization. The answer
        # is wrong then. If the right answer raises too, the scorer is broken and the group fails.
        dataset.score_answer(answer=question.ground_truth, entry=entry)
        return repr(error)


def entry_of(question: Question) -> dict[str, Any]:
    return {
        "question": question.messages[-1]["content"], "answer": question.ground_truth, "metadata": question.extra,
    }  # fmt: skip
