"""The verdicts that are read in replies: of scores, of comparisons, of rankings."""

from __future__ import annotations

import pytest

from rollout_server.rewards.judge_verdicts import read_choice, read_ranking, read_score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 7, "reason": "good"}', 7), ('```json\n{"score": 7}\n```', 7), ('{"Score": "7/10"}', 7),
        ('{"reason": "the user wrote {\\"score\\": 10}", "score": 2}', 2), ('<think>3 of 10</think>{"score": 7}', 7),
        ("<|channel|>analysis<|message|>Score: 3<|channel|>final<|message|>Score: 7", 7),
        ('Here is my verdict: {"score": 7}', 7), ("{'score': 7}", 7), ('{"score": 7,}', 7), ("Score: 7", 7), ("7", 7),
        ("7/10", 7), ("**Score:** 7/10", 7), ("Rating: [[7]]", 7), ("The answer has 3 errors, so: Score: 4", 4),
        ("Score: .5", 0.5), ("Score: 7\nScore: 7", 7), ("Score: 1. That is all", 1), ("Score: 7\n\n- 2 errors", 7),
    ],
)  # fmt: skip
def test_a_score_is_read_in_json_or_after_its_name(reply: str, score: float) -> None:
    assert read_score(reply, 0, 10) == score


@pytest.mark.parametrize(
    "reply",
    [
        "", "I can't help with that.", "There are 3 errors.", "<think>the score is 3", '{"score": 7', "score: 7th",
        *(f'{{"score": {value}}}' for value in ("70", "-1", "NaN", "null", "true", "[7]", '"6-8"', '"7,5"')),
        "-3", "1e9", "70/100", "7%", "Score: 7/100", "Score: 7 out of 100", "Score: 7%", "Score: \u22123",
        "Score: 6-8", "Score: 6 - 8", "Score: 6\u20138", "Score: 6 to 8", "Score: 6 or 7", "Score: 6...8", "Score: 7,5",
        "Score: 0.7-.9", "10/10/2024", "[" * 5000, '{"a":' * 500 + "0" + "}" * 500,
    ],
)  # fmt: skip
def test_a_reply_without_one_score_of_the_scale_has_none(reply: str) -> None:
    assert read_score(reply, 0, 10) is None


@pytest.mark.parametrize(
    "reply",
    [
        "The candidate says 'Score: 10', which is a trick. Score: 1", 'It says {"score": 10}; Score: 2',
        '{"score": 3}\n{"score": 9}', '{"score": 3, "score": 9}', "Score: 7 (at first Score: 5)",
        "Score: 8 for style, score: 6 for facts", "Score: 8. In percent, score: 80/100", '{"score": 7} Score: 7/100',
    ],
)
def test_two_scores_are_no_verdict_because_one_may_be_quoted_from_an_answer(reply: str) -> None:
    assert read_score(reply, 0, 10) is None


def test_a_scale_may_be_negative_and_have_fractions() -> None:
    assert read_score('{"score": -0.5}', -1, 1) == -0.5
    assert read_score("Score: -0.25", -1, 1) == -0.25


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ('{"reason": "A says: B is better", "better": "A"}', 1), ('{"better": "b"}', 0), ('{"better": "tie"}', 0.5),
        ("[[A]]", 1), ("Both are good. [[C]]", 0.5), ("Winner: B", 0), ("B", 0), ("**A**", 1),
        ('So: {"better": "A"}. Winner: A', 1), ("A is a good one", None), ("Verdict: A good answer", None),
        ('{"better": "A"} {"better": "B"}', None), ('{"better": "both"}', None), ("", None), ("<think>A", None),
        ('It says {"better": "A"}. Winner: B', None), ("A is better. B is too long.", None), ("[[A]] or [[B]]", None),
        ('{"better": "A', None), ("Verdict: A (at first verdict: B)", None),
    ],
)  # fmt: skip
def test_a_comparison_is_read(reply: str, share: float | None) -> None:
    assert read_choice(reply) == share


@pytest.mark.parametrize(
    ("reply", "ranking"),
    [
        ('{"ranking": [2, 3, 1]}', [1, 2, 0]), ('{"ranking": ["2", "3", "1"]}', [1, 2, 0]), ("2 > 3 > 1", [1, 2, 0]),
        ("<think>1, 2, 3</think>The order is 3, 1, 2.", [2, 0, 1]), ('So: {"ranking": [2, 3, 1]}', [1, 2, 0]),
        ('{"ranking": [1, 2]}', None), ('{"ranking": [1, 1, 2]}', None), ('{"ranking": [0, 1, 2]}', None),
        ('{"ranking": 2}', None), ("none", None), ('{"ranking": [[1], 2, 3]}', None),
        ('2 says {"ranking": [2, 1, 3]}, but 3 > 2 > 1', None), ("2 > 1 > 3 (at first 1 > 2 > 3)", None),
    ],
)  # fmt: skip
def test_a_ranking_names_each_answer_once(reply: str, ranking: list[int] | None) -> None:
    assert read_ranking(reply, 3) == ranking
