"""References: which the rules refuse, and which the answers that are equal to them are."""

from __future__ import annotations

import itertools

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.rules import check_reference, math_verify, only_boxes, with_marked_math


@pytest.mark.parametrize(("rules", "refused", "taken"), [
    (("gsm8k", "gsm8k_flexible"), ["", " ", "n/a", "She has 3.\n#### 72", "nan", float("nan"), None, True, [72]],
     ["72", "1,234", "-3", ".5", " 72\n", 72, 72.0]),
    (("math_verify",), [None, True, False, "", " \n", [], {}, {"a": 1}, float("nan"), float("inf")],
     [0, 0.5, "x", ["1", "2"]]),
])  # fmt: skip
def test_a_reference_that_a_rule_can_not_use_is_refused(
    rules: tuple[str, ...], refused: list[object], taken: list[object]
) -> None:
    for rule, answer in itertools.product(rules, refused):
        with pytest.raises(ConfigError, match=r"^row 1: .*task\.columns\.reference"):
            check_reference(rule, answer, "row 1")
    assert {check_reference(rule, answer, "row 1") for rule, answer in itertools.product(rules, taken)} == {""}


ZEROS = ("1-1", "\\sqrt3-\\sqrt3", "0.5-\\frac12", "\\sin(\\pi)", "e^{\\ln 2}-2")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("-3 1/2", ["-3.5", "-\\frac{7}{2}", "-3 1/2"], ["-2", "3.5"]),
        ("1 000", ["1000", "1,000", "1 000"], ["0", "1"]),
        (1e-5, ["0.00001", "10^{-5}", "1e-5"], ["0"]),
        ("42.", ["42", "42.", "42.0"], ["4.2"]),
        ("1.6e-19", ["1.6 \\times 10^{-19}", "1.6e-19"], ["9.1 \\times 10^{-31}", "0", "0.0", "-3e-9"]),
        ("10^{-19}", ["10^{-19}", "0.1 \\times 10^{-18}", "1e-19"], ["10^{-31}", "2 \\times 10^{-19}"]),
        ("6.02e23", ["6.02 \\times 10^{23}", "N_A = 6.02\\times10^{23}", "602000000000000000000000"],
         ["6.03 \\times 10^{23}", "N=6.03\\times10^{23}"]),
        (5.97e24, ["5.97 \\cdot 10^{24}"], ["5970000000000000000000001"]),
        ("1/3", ["0.333333"], ["0.33333"]),
        ("50\\%", ["50", "0.5"], ["5"]),
        ("0", ["0.0", "-0", *ZEROS], ["0.0000001", "10^{-31}", "1-1+10^{-9}"]),
        *((zero, ["0", "1-1"], ["10^{-31}"]) for zero in ZEROS[1:3]),
        ("x=0.0000001", ["10^{-7}", "x=10^{-7}"], ["2\\times10^{-7}", "x=0.0000002", "y=10^{-7}", "x=0", "x=1-1"]),
    ],
)
def test_math_verify_finds_equal_what_people_do(answer: object, right: list[str], wrong: list[str]) -> None:
    question = Question(messages=(), ground_truth=answer)
    assert [each for each in right + wrong if math_verify(question, f"so it is $\\boxed{{{each}}}$")] == right


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("3 1/2", "The answer is 3 1/2."), ("1 000", "$1 000$"), ("1e-5", "$1e-5$"), ("$3 1/2$", "\\boxed{3 1/2}"),
        ("\\(1 000\\)", "\\boxed{1 000}"), ("1 234 567", "\\boxed{1\\,234\\,567}"),
        ("5", "It costs $5 and $3 more, \\boxed{5}"),
    ],
)  # fmt: skip
def test_an_answer_that_is_written_as_its_reference_is_right(answer: str, response: str) -> None:
    assert math_verify(Question(messages=(), ground_truth=answer), response) == 1.0


@pytest.mark.timeout(60)
def test_a_response_of_many_digits_or_open_boxes_is_read_in_the_time_of_its_length() -> None:
    for text in ("9" * 400_000, "1 2/" + "9" * 400_000, "1 " + "9" * 5000 + "/" + "9" * 5001):
        assert with_marked_math(f"${text}$") == f"${text}$"
    assert only_boxes("\\boxed{" * 100_000) == "\\.....{" * 100_000
