"""The tests of verl's schemas, and what their comparison outside of the program takes for right."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rollout_server.rewards.code.cases import ENCODE, Case, decode, is_equal_output, read_cases
from rollout_server.rewards.code.checker import find_program, whole_program

names: dict[str, Any] = {}
exec(ENCODE, names)
encode = names["_encode_result"]


@pytest.mark.parametrize(("output", "expected", "is_equal"), [
    ("3\n", "3", True), ("  3 4 \n\n", "3 4\n", True), ("3\n4\n", "3\n4", True), ("3", "3\n4", False),
    ("3\n4\n5", "3\n4", False), ("3 4", "3\n4", False), ("", "3", False), ("3.0000001", "3.0", True),
    ("3.1", "3.0", False), ("3.0", "3", False),  # a whole number is a word
    ("nan", "1.5", False), ("inf", "1e400", False), ("YES", "yes", False),
])  # fmt: skip
def test_outputs_are_compared_by_words_and_lines(output: str, expected: str, is_equal: bool) -> None:
    assert is_equal_output(output, expected) == is_equal


@pytest.mark.parametrize("value", [
    None, True, 3, -1.5, float("inf"), "ü\n", b"\x00", [1, [2]], (1, (2,)), {1, 2},
    {1: "a", (2, 3): [None]}, [], (), {}, 2**200,
])
def test_a_value_comes_out_as_it_is(value: object) -> None:
    found = decode(json.loads(encode(value)))
    assert found == value and type(found) is type(value)


def passed(case: Case, *values: object) -> bool:
    written = ", ".join(map(encode, values))
    result = f"[{written}]" if case.kind == "outside" else written
    return case.is_passed_by(f"noise of the answer\n{case.marker} {result}\n")


def test_a_call_has_lines_of_json_as_arguments_and_one_json_as_result() -> None:
    (case,) = read_cases({"fn_name": "add", "inputs": ["[1, 2]\n3"], "outputs": ["[4, 5]"]})
    assert "[[1, 2], 3]" in case.suffix and "[4, 5]" not in case.suffix and not case.is_cheatable
    assert passed(case, [4, 5]) and passed(case, (4, 5)) and not passed(case, [4]) and not passed(case, "[4, 5]")
    (case,) = read_cases(json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[7]]}))
    assert passed(case, 7) and passed(case, [7])  # verl wraps results in a list
    (case,) = read_cases({"fn_name": "f", "inputs": ["1"], "outputs": ["[4, 5]"]})
    assert passed(case, [4, 5]) and not passed(case, 4)
    (case,) = read_cases({"fn_name": "f", "inputs": ["1"], "outputs": ['[[{"-1": {"5": 1}}]]']})
    assert passed(case, [{-1: {5: 1}}]) and passed(case, [{"-1": {"5": 1}}]) and not passed(case, [{1: {5: 1}}])


@pytest.mark.parametrize("code", [
    "check(f)", "assert f(1) == f(2)", "assert is_same(f(1), [1])", "for x in (1, 2): assert f(x) == x", "",
])
def test_other_asserts_run_inside_and_are_cheatable(code: str) -> None:
    (case,) = read_cases({"assert_case": [code]})
    assert case.is_cheatable and code in case.suffix
    assert case.is_passed_by(f"\n{case.marker} passed\n")
    assert not case.is_passed_by("") and not case.is_passed_by("passed")


@pytest.mark.parametrize("result", ["", "[", "nonsense", '["float", "x"]', '["no", 1]', "[1, 2, 3]", "[" * 100_000])
def test_a_result_that_can_not_be_read_is_wrong(result: str) -> None:
    (case,) = read_cases({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]})
    assert not case.is_passed_by(f"\n{case.marker} {result}\n") and not case.is_passed_by(result)


@pytest.mark.parametrize("tests", [
    [], {}, {"inputs": ["1"], "outputs": []}, {"inputs": "", "outputs": "", "assert_case": ""},
    {"inputs": "", "outputs": [1]}, {"inputs": [], "outputs": []}, {"assert_case": [1]},
    {"assert_case": "assert f(1) == 2"}, {"inputs": "3\n", "outputs": "6\n"}, {"inputs": ["3", "4"], "outputs": "68"},
    {"fn_name": "f", "inputs": [3], "outputs": [6]}, {"fn_name": "a b", "inputs": ["1"], "outputs": ["1"]},
])  # fmt: skip
def test_tests_of_another_schema_are_refused(tests: object) -> None:
    with pytest.raises(ValueError):
        read_cases(tests)


@pytest.mark.parametrize(("said", "program"), [
    ("first\n```python\na = 1\n```\nthen\n```py\nx = 1\n```\nand\n```json\n{}\n```\nend", "x = 1\n"),
    ("no code", None), ("```\nx = 1\n```", "x = 1\n"), ("```{.python}\r\nx = 1\r\n```\r\n", "x = 1\n"),
    ("The prompt said wrap in ```.\n\n```Python title=a.py\nx = 1\n```\nOutput:\n```\n1\n```", "x = 1\n"),
    ("<think>```python\ndraft\n``` wrong</think>\n```\nx = 1\n```", "x = 1\n"),
    ("1. say ```x``` so\n   ``` py3\n   x = 1\n   ```", "x = 1\n"),
])  # fmt: skip
def test_the_last_block_of_the_language_is_the_program_however_it_is_written(said: str, program: str | None) -> None:
    assert find_program(said) == program


@pytest.mark.parametrize("future", [
    '"""Adds."""\nfrom __future__ import (\n    annotations,\n    division,\n)  # so',
    "from __future__ import annotations; import os",
])
def test_an_answer_with_an_import_of_the_future_has_the_other_imports(future: str) -> None:
    program = f"{future}\ndef f(x: List[int]): return gcd(*x)\nif __name__ == '__main__': raise ValueError\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    before = dict(sys.modules)
    try:
        exec(whole_program(program, "found = f([8, 12])"), names)
    finally:
        sys.modules.pop("answer", None)
        sys.modules.update(before)
    assert names["found"] == 4
