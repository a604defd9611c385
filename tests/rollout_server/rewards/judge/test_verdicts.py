"""The verdicts that are read in replies: of scores, of comparisons, of rankings."""

from __future__ import annotations

import pytest

from rollout_server.rewards.judge.replies import read_choice, read_ranking, read_score

SCORES = [
    ('{"score": 7, "reason": "good"}', 7), ('```json\n{"score": 7}\n```', 7), ('Here is my verdict: {"score": 7}', 7),
    ('<think>maybe 3 of 10</think>{"score": 7}', 7), ("<think>the score may be 3 or 4 and", None),
    ('{"score": "7"}', 7),
    ('{"score": 7/10}', 7), ('{"score": 7', None), ('{"reason": "the user wrote {\\"score\\": 10}", "score": 2}', 2),
    ("Score: 7", 7), ("7", 7), ("7/10", 7), ("**Score:** 7", 7), ("I rate this 7 out of 10.", 7),
    ("The answer has 3 errors, so: Score: 4", 4), ("I can't help with that.", None), ("", None),
    ('{"score": 70}', None),
    ('{"score": NaN}', None), ('{"score": null}', None), ('{"score": true}', None), ("Rating: [[7]]", 7),
    ("Score: 8. On second thought, Score: 5", 5), ('{"score": 3}\n{"score": 9}', None),
    ("The candidate says 'Score: 10', which is a trick. Score: 1", 1), ('{"Score": 7}', 7), ("{'score': 7}", 7),
    ('{"score": 7,}', 7), ("\u5206\u6570\uff1a7", 7),
]  # fmt: skip
"""Replies, and the verdict that a person would read in them."""


@pytest.mark.parametrize(("reply", "score"), SCORES)
def test_a_score_is_read_as_a_person_would(reply: str, score: float | None) -> None:
    assert read_score(reply, 0, 10) == score


@pytest.mark.parametrize(
    "reply",
    ["-3", '{"score": -1}', '{"score": [7]}', '{"score": Infinity}', "1e9", "There are 3 errors.", "70/100",
     "[" * 5000, '{"a":' * 500, "score: 7th", "Score: 7/100", "Score: 7 out of 100", "Rating: 7 / 5", "Score: 7%",
     "7%", "Grade: 7%",
     "Score: 8. In percent, score: 80/100", 'The candidate says {"score": 10}; Score: 2', '{"score": 7} Score: 7/100',
     'It claims a score: 10. {"score": 2}', '{"reason": "x", "score": null} Score: 2', "Score: \u22123", "10/10/2024"],
)
def test_what_is_no_score_of_the_scale_gives_none(reply: str) -> None:
    assert read_score(reply, 0, 10) is None


@pytest.mark.parametrize(("reply", "score"), [
    ("Steps: 3\nGrade: 7", 7), ("Grade: 7\nMarks: 5", None), ("Grade: 7, as it has 3 errors", None),
    *((f"{label}: 7", 7) for label in (
        "My final grade", "Marks", "Points", "Total", "The total", "**Overall**", "Overall rating", "Evaluation",
        "Assessment", "Reward", "Scores", "Quality", "Helpfulness", "- The overall quality", "Final grade (0-10)",
        "**Grade [0-10]**", "Verdict", "Total points", "\u8bc4\u5206", "\u6700\u7ec8\u5f97\u5206", "\u603b\u5206",
    )),
    ("\u5206\u6570\uff1a7", 7), ("\u7b54\u6848\uff1a4", None), ("I rate it so: 7.", None), ("We iterate: 4", None),
    *((f"{label}: 4", None) for label in (
        "Note: the right answer is", "I would say that the correct answer is", "The candidates say the answer is",
        "The points where f crosses zero", "The interest rate", "The rate is", "The total is", "The final result is",
        "Final answer", "The answer points to", "It is", "Key points", "Result", "Steps", "The right answer is",
        "The given points", "Final numerical value", "Thus the answer is", "Points on the answer sheet",
        "Points awarded", "My grade is", "Final",
    )),
])
def test_a_number_after_a_colon_is_a_score_only_where_its_label_is_for_one(reply: str, score: float | None) -> None:
    assert read_score(reply, 0, 10) == score


@pytest.mark.parametrize(("reply", "score"), [
    ("Score: .5", 0.5), (".5", 0.5), (".5/1", 0.5), ("I say .5 out of 1.", 0.5), ('{"score": ".5"}', 0.5),
    ("Grade: .5", 0.5), ("Score: -.5", None), ("Score: 0.7-.9", None), ("Score: .5 or .7", None), ("Score: 5", None),
    (".6-.8/1", None), ("Score: 1. That is all", 1), ("Grade: -1", None),
])
def test_a_score_may_begin_with_the_point(reply: str, score: float | None) -> None:
    assert read_score(reply, 0, 1) == score


@pytest.mark.parametrize(
    "reply",
    ["Score: 6-8", "Score: 6 - 8", "Score: 6\u20138", "Score: 6 to 8", "Score: 6 or 7", "Score: 6...8", "Score: 6-8/10",
     "I say 6 to 8 out of 10.", "6-8/10", "7/10 or 8/10", "Score: 16-18", '{"score": "6-8"}',
     "Score: 7,5", "Score: 7,5/10", "7,5/10", '{"score": "7,5"}'],
)
def test_a_range_and_a_decimal_comma_are_no_verdict(reply: str) -> None:
    assert read_score(reply, 0, 10) is None


@pytest.mark.parametrize(
    "reply",
    ["Score: 7 (at first Score: 5)", "Score: 7 (Score: 5)", "Score: 7 or Score: 8", "Score: 7. My first score: 5",
     "Score: 7. Score: 5 was my first idea.", 'Score: 7. The candidate says "Score: 10"', 'Score: 7. "Score: 10"?',
     "Score: 8 for style, score: 6 for facts", "Clarity score: 8\nStyle score: 6", "Clarity: 8\nStyle: 6",
     "It is 3/10 (at first 5/10).", "Clarity 8/10, style 6/10"],
)
def test_two_numbers_of_which_the_last_does_not_clearly_hold_are_no_verdict(reply: str) -> None:
    assert read_score(reply, 0, 10) is None


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Score: 7\nScore: 7", 7), ("The answer says Score: 10. My score: 3", 3),
     ("**Score: 8**\n\n**Final score: 7**", 7), ("Score: 7, no, rather Score: 6", 6),
     ("It claims 10/10. I give it 3/10, because it is wrong.", 3),
     ("Score: 7\n\n- 2 errors", 7), ("Score: 7, since 3 steps are wrong", 7),
     ("<|channel|>analysis<|message|>Score: 3<|channel|>final<|message|>Score: 7", 7)],
)
def test_a_number_that_clearly_replaces_another_is_the_verdict(reply: str, score: float) -> None:
    assert read_score(reply, 0, 10) == score


@pytest.mark.parametrize("key", ["score", "better", "ranking"])
def test_one_object_with_two_verdicts_has_none(key: str) -> None:
    read = {"score": lambda text: read_score(text, 0, 10), "better": read_choice,
            "ranking": lambda text: read_ranking(text, 2)}[key]  # fmt: skip
    one, other = {"score": ("7", "3"), "better": ('"A"', '"B"'), "ranking": ("[1, 2]", "[2, 1]")}[key]
    assert read(f'{{"{key}": {one}}}') is not None
    assert read(f'{{"{key}": {one}, "{key}": {other}}}') is None
    assert read(f'{{"{key}": {one}, "{key.title()}": {other}}}') is None


def test_a_text_in_json_is_a_score_if_it_is_out_of_the_top_of_the_scale() -> None:
    assert read_score('{"score": "7/10"}', 0, 10) == read_score('{"score": "7 out of 10"}', 1, 10) == 7
    assert read_score('{"score": "7/10"}', 0, 100) is None
    assert read_score('{"score": "70%"}', 0, 100) == 70
    assert read_score('{"score": "70%"}', 0, 10) is None


def test_a_verdict_in_json_and_the_same_in_words_agree() -> None:
    for reply in ('{"score": 2} Score: 2', 'Score: 2/10. {"score": 2}', '{"score": 2.0}. Rating: 9, no, Rating: 2'):
        assert read_score(reply, 0, 10) == 2
    assert read_score("Score: 7%", 0, 100) == read_score("Score: 7 / 100.0", 0, 100) == 7
    assert read_score("The candidate says 7/100, I say Score: 3/5", 1, 5) == 3


def test_a_scale_may_be_negative_and_have_fractions() -> None:
    assert read_score('{"score": -0.5}', -1, 1) == -0.5
    assert read_score("Score: -0.25", -1, 1) == -0.25


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ('{"reason": "A says: B is better", "better": "A"}', 1), ('{"better": "b"}', 0), ('{"better": "tie"}', 0.5),
        ("[[A]]", 1), ("Both are good. [[C]]", 0.5), ("Winner: B", 0), ("B", 0), ("**A**", 1),
        ("A is a good one", None),
        ('{"better": "A"} {"better": "B"}', None), ('{"better": "both"}', None), ("", None), ("<think>A", None),
        ("Verdict: A? No. Verdict: B", 0), ('{"better": "A', None),
        ('It says {"better": "A"}. Winner: B', None), ('{"better": "A"}. Winner: A', 1), ('{"better": 1} [[B]]', None),
        ('B is better. A is long. {"better": "B"}', 0), ('{"better": "A"} {"better": "A"}', None),
        ("Verdict: A is better", 1), ("Winner: A, because", 1), ("Verdict: a tie", 0.5), ("Verdict: A tie", 0.5),
        ("A is better. B is too long.", None), ("B is better, a clear win", None), ("Verdict: A good answer", None),
        ("Verdict: A (at first verdict: B)", None), ("[[A]] or [[B]]", None),
    ],
)
def test_a_comparison_is_read(reply: str, share: float | None) -> None:
    assert read_choice(reply) == share


@pytest.mark.parametrize(
    ("reply", "ranking"),
    [
        ('{"ranking": [2, 3, 1]}', [1, 2, 0]), ('{"ranking": ["2", "3", "1"]}', [1, 2, 0]), ("2 > 3 > 1", [1, 2, 0]),
        ("<think>1, 2, 3</think>The order is 3, 1, 2.", [2, 0, 1]), ('{"ranking": [1, 2]}', None),
        ('{"ranking": [1, 1, 2]}', None), ('{"ranking": [0, 1, 2]}', None), ('{"ranking": 2}', None), ("none", None),
        ('{"ranking": [[1], 2, 3]}', None), ('2 says {"ranking": [2, 1, 3]}, but 3 > 2 > 1', None),
        ('I have read 1, 2, 3. {"ranking": [2, 3, 1]}', [1, 2, 0]),
        ("I have read 1, 2, 3. The order is 3, 1, 2.", [2, 0, 1]), ("2 > 1 > 3 (at first 1 > 2 > 3)", None),
        ('2 > 3 > 1, so {"ranking": [2, 3, 1]}', [1, 2, 0]), ('1, 3 are good. {"ranking": [3, 1, 2]}', [2, 0, 1]),
    ],
)
def test_a_ranking_names_each_answer_once(reply: str, ranking: list[int] | None) -> None:
    assert read_ranking(reply, 3) == ranking
