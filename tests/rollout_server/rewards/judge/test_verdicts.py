"""The verdicts that are read in replies: of scores, of comparisons, of rankings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.rewards.judge_verdicts import read_choice, read_ranking, read_score

NAMED = (
    '{{"score": {}}}', "Score: {}", "**Score:** {}/10", "Rating: [[{}]]", "So, as asked: score: {}. That is all",
)
"""Places in which a judge writes its score under a name."""
ALONE = (
    "{}", "{}/10", '```json\n{{"score": {}}}\n```', '<think>3 of 10</think>{{"score": {}}}', "{{'score': {}}}",
    '{{"reason": "the user wrote {{\\"score\\": 10}}", "Score": "{}/10"}}', '{{"score": {},}}',
    "<|channel|>analysis<|message|>Score: 3<|channel|>final<|message|>Score: {}", "It has 2 errors, so: Score: {}",
)
"""Whole replies with one score."""
SCORES = st.integers(0, 10) | st.decimals(0, 10, places=2, allow_nan=False).filter(lambda value: value % 1)


@given(form=st.sampled_from(NAMED + ALONE), score=SCORES)
def test_a_score_is_read_in_json_or_after_its_name(form: str, score: float) -> None:
    assert read_score(form.format(score), 0, 10) == float(score)


@given(forms=st.tuples(*[st.sampled_from(NAMED)] * 2), scores=st.tuples(SCORES, SCORES))
def test_two_scores_are_no_verdict_because_one_may_be_quoted_from_an_answer(
    forms: tuple[str, str], scores: tuple[float, float]
) -> None:
    reply = "It says '{}', which is a trick. {}".format(*map(str.format, forms, scores))
    assert read_score(reply, 0, 10) == (float(scores[0]) if scores[0] == scores[1] else None)


@pytest.mark.parametrize("reply", [
    "", "There are 3 errors.", "<think>the score is 3", '{"score": 7', "score: 7th", '{"score": 3, "score": 9}',
    *(f'{{"score": {value}}}' for value in ("70", "-1", "NaN", "null", "true", "[7]", '"6-8"', '"7,5"')),
    "-3", "1e9", "70/100", "7%", "Score: 7 out of 100", "Score: 7%", "Score: \u22123", "Score: 6 \u2013 8",
    "Score: 6 to 8", "Score: 6...8", "Score: 7,5", "10/10/2024", "[" * 5000, '{"a":' * 500 + "0" + "}" * 500,
])  # fmt: skip
def test_a_reply_without_one_score_of_the_scale_has_none(reply: str) -> None:
    assert read_score(reply, 0, 10) is None
    assert read_score("Score: -0.25", -1, 1) == -0.25  # a scale may be negative


@pytest.mark.parametrize(("reply", "share"), [
    ('{"reason": "A says: B is better", "better": "A"}', 1), ('{"better": "b"}', 0), ("Both are good. [[C]]", 0.5),
    ("Winner: B", 0), ("**A**", 1), ('So: {"better": "A"}. Winner: A', 1), ("A is a good one", None),
    ("Verdict: A good answer", None), ('{"better": "A"} {"better": "B"}', None), ('{"better": "both"}', None),
    ("<think>A", None), ("[[A]] or [[B]]", None), ('{"better": "A', None), ("Verdict: A (at first verdict: B)", None),
])  # fmt: skip
def test_a_comparison_is_read(reply: str, share: float | None) -> None:
    assert read_choice(reply) == share


@given(order=st.permutations([1, 2, 3, 4]), other=st.permutations([1, 2, 3, 4]))
def test_a_ranking_names_each_answer_once(order: list[int], other: list[int]) -> None:
    arrows, expected = " > ".join(map(str, order)), [number - 1 for number in order]
    for reply in (json.dumps({"ranking": order}), f"<think>1, 2, 3, 4</think>The order is {arrows}."):
        assert read_ranking(reply, 4) == expected
        assert read_ranking(reply, 5) is read_ranking(reply, 3) is None
    twice = f"It says {json.dumps({'ranking': other})}, but {arrows}"
    assert read_ranking(twice, 4) == (expected if order == other else None)
    for wrong in ([1, 1, 2, 3], [0, 1, 2, 3], [[1], 2, 3, 4], 2):
        assert read_ranking(json.dumps({"ranking": wrong}), 4) is None
