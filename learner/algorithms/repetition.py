"""Measures how much answers repeat: tokens within an answer, and one answer over the prompts of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from async_rl.types import Batch, Row
from learner.episodes import rows_by_episode


def distinct_fraction(rows: Sequence[Row]) -> float:
    """Return the share of distinct tokens among those that the model sampled in an episode; 1 if there are none."""
    tokens = _sampled(rows)
    return len(np.unique(tokens)) / len(tokens) if len(tokens) else 1.0


def repeated_fraction(batch: Batch) -> float | None:
    """Return how far all prompts of a batch get the same answer; None if it has fewer than two different prompts.

    s_p(a) is the share of the answers to prompt p that equal a, token for token, those too that are too old
    to be trained; P is the number of prompts. Answers without any token are left out.

        max over a of  (sum over p of s_p(a)  -  max over p of s_p(a)) / (P - 1)

    It is 0 if no two prompts get the same answer, however often one prompt gets it, 1 if all get one answer, and about
    1/2 where half of the questions are answered by yes, the others by no.
    """
    answers: dict[bytes, list[bytes]] = {}
    for group in batch.groups:
        of_prompt = answers.setdefault(group.prompt_tokens.tobytes(), [])
        sampled = (_sampled([group.rows[row] for row in rows]) for rows in rows_by_episode(group))
        of_prompt += [tokens.tobytes() for tokens in sampled if len(tokens)]
    return _largest_overlap([_shares(of_prompt) for of_prompt in answers.values()])


def _largest_overlap(shares: Sequence[Mapping[bytes, float]]) -> float | None:
    if len(shares) < 2:
        return None
    totals: dict[bytes, float] = {}
    largest: dict[bytes, float] = {}
    for of_prompt in shares:
        for answer, share in of_prompt.items():
            totals[answer] = totals.get(answer, 0.0) + share
            largest[answer] = max(largest.get(answer, 0.0), share)
    return max((totals[answer] - largest[answer] for answer in totals), default=0.0) / (len(shares) - 1)


def _shares(answers: Sequence[bytes]) -> dict[bytes, float]:
    return {answer: count / len(answers) for answer, count in Counter(answers).items()}


def _sampled(rows: Iterable[Row]) -> np.ndarray:
    return np.concatenate([row.tokens[row.sampled] for row in rows])
