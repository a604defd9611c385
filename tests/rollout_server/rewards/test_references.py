"""References: which the rules refuse, and which the answers that are equal to them are."""

from __future__ import annotations

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.rules import as_math, check_reference, ends_with, math_verify, only_boxes, with_marked_math


@pytest.mark.parametrize("answer", ["", " ", "n/a", "She has 3.\n#### 72", "nan", float("nan"), None, True, [72]])
@pytest.mark.parametrize("rule", ["gsm8k", "gsm8k_flexible"])
def test_a_reference_that_is_no_number_is_refused_by_the_rules_of_numbers(rule: str, answer: object) -> None:
    with pytest.raises(ConfigError, match=r"^row 1: .*task\.columns\.reference"):
        check_reference(rule, answer, "row 1")


@pytest.mark.parametrize("answer", ["72", "1,234", "-3", ".5", " 72\n", 72, 72.0])
def test_a_reference_that_is_a_number_is_taken(answer: object) -> None:
    assert check_reference("gsm8k", answer, "row 1") == ""


@pytest.mark.parametrize("answer", [None, True, False, "", " \n", [], {}, {"a": 1}, float("nan"), float("inf")])
def test_a_reference_that_is_no_answer_is_refused_by_math_verify(answer: object) -> None:
    with pytest.raises(ConfigError, match=r"^row 1: .*task\.columns\.reference"):
        check_reference("math_verify", answer, "row 1")
    for taken in (0, 0.5, "x", ["1", "2"]):
        check_reference("math_verify", taken, "row 1")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (72.0, "72"), (0.5, "0.5"), (1e-5, "0.00001"), (1e22, "1" + "0" * 22), (5.97e24, "597" + "0" * 22), (-0.0, "0"),
        (7, "7"), ("1e-5", "0.00001"),
        ("1.5E3", "1500"), ("2e", "2e"), ("1e999", "1e999"), ("3 1/2", "(3+1/2)"), ("-3 1/2", "-(3+1/2)"),
        ("1 000", "1000"), ("-12 345 678.5", "-12345678.5"), ("1 000/3", "1 000/3"), ("12 34", "12 34"), ("42.", "42"),
        ("0.333...", "0.333..."), (" x = 3. ", "x = 3"), ("\\frac12", "\\frac12"),
    ],
)  # fmt: skip
def test_a_reference_is_written_as_math_verify_reads_it(answer: object, text: str) -> None:
    assert as_math(answer) == text
    assert with_marked_math(f"so \\boxed{{{text}}}.") == f"so \\boxed{{{text}}}."


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["9" * 400_000, "1 2/" + "9" * 400_000, "1 " + "9" * 5000 + "/" + "9" * 5001])
def test_a_number_with_very_many_digits_stays_as_it_is_and_is_read_at_once(text: str) -> None:
    assert with_marked_math(f"${text}$") == f"${text}$"


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


@pytest.mark.parametrize("response", ["13 1/2", "-3 1/2", "2 3 1/2", "x3 1/2", "3 1/2 and more", ""])
def test_a_response_that_ends_otherwise_does_not_end_with_the_answer(response: str) -> None:
    assert not ends_with(f"It is\n{response}", "3 1/2")
    assert ends_with("It is\nx = 3 1/2.\n", "3 1/2")


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("so $41$ and \\boxed{42}, or \\boxed{x}.", ".. $..$ and \\boxed{42}, or \\boxed{x}."),
        ("a \\boxed{\\frac{1}{2}} b \\boxed{\\boxed{3}} c", ". \\boxed{\\frac{1}{2}} . \\boxed{\\boxed{3}} ."),
        ("\\boxed{1} and \\boxed{2", "\\boxed{1} and \\.....{."),
        ("\\boxed{1 and \\boxed{2}", "\\.....{. and \\boxed{2}"),
        ("The final answer is 41", "... ..... ...... .. .."),
    ],
)
def test_outside_of_boxes_nothing_is_left_to_read(text: str, boxes: str) -> None:
    assert only_boxes(text) == boxes


@pytest.mark.timeout(60)
def test_many_boxes_that_are_not_closed_are_read_at_once() -> None:
    assert only_boxes("\\boxed{" * 100_000) == "\\.....{" * 100_000
