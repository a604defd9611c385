from __future__ import annotations

import pytest

from rollout_server.episodes.tools.calculator import calculate
from rollout_server.episodes.tools.tool import Tool


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("-2 ** 2", "-4"),
        ("17 // 5 + 17 % 5", "5"),
        ("1,250 * 2", "2500"),
        ("2 ** 0.5", "1.41421356237"),
        (" 5 ", "5"),
        ("2 ** 200 * 3", str(2**200 * 3)),
    ],
)
def test_an_expression_is_calculated(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("__import__('os')", "only numbers"),
        ("(1).real", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 5", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1, 2", "only numbers"),
        ("2 ^ 3", "only numbers"),
        ("1j", "only numbers"),
        ("9 ** 9 ** 9", "too large"),
        ("(-2) ** 0.5", "real number"),
        ("1e308 * 10", "finite"),
        ("2 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("x = 1", "no arithmetic expression"),
        ("(" * 150 + "1" + ")" * 149, "no arithmetic expression"),
        ("1 + " * 100 + "1", "at most 300 characters"),
    ],
)
def test_everything_else_is_refused(expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        calculate(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "1e200 ** 2", "10.0 ** 400", "1 // 0", "2 ** -5000 * 1"])
def test_arithmetic_errors_are_errors_and_not_crashes(expression: str) -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        calculate(expression)


@pytest.mark.timeout(20)  # without limits one of them would never end
def test_every_expression_ends() -> None:
    assert calculate("-" * 290 + "1") == "1"
    assert calculate("9" * 300) == "9" * 300
    for expression in ("*".join(["9**600"] * 40), "**".join(["2"] * 60)):
        with pytest.raises(ValueError, match="the power is too large"):
            calculate(expression)


def test_the_model_is_told_what_it_may_write() -> None:
    function = Tool.from_function(calculate).schema["function"]
    assert function["name"] == "calculate" and "parentheses" in function["parameters"]["properties"]["expression"][
        "description"
    ]
