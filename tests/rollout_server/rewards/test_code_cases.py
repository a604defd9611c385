"""The tests of verl's schemas, and what their comparison outside of the program takes for right."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rollout_server.rewards.code.cases import ENCODE, Case, decode, is_equal_output, read_cases
from rollout_server.rewards.code.checker import CodeSettings, find_program, whole_program

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
    None, True, 3, -1.5, float("inf"), 1j, "ü\n", b"\x00", [1, [2]], (1, (2,)), {1, 2},
    {1: "a", (2, 3): [None]}, [], (), {}, 2**200,
])
def test_a_value_comes_out_as_it_is(value: object) -> None:
    found = decode(json.loads(encode(value)))
    assert found == value and type(found) is type(value)


class AlwaysEqual(list):
    """The cheat that gets full marks where values are compared beside the answer."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_an_object_that_is_always_equal_comes_out_as_what_it_holds_or_not_at_all() -> None:
    assert decode(json.loads(encode(AlwaysEqual([1])))) == [1]
    with pytest.raises(TypeError):
        encode(object())


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


@pytest.mark.parametrize(("code", "value", "is_passed"), [
    ("assert f(1) == 3", 3, True), ("assert f(1) == 3", 3.0, True), ("assert f(1) == 3", "3", False),
    ("assert 3 == f(1)", 3, True), ("assert f(1) == (1, 2)", [1, 2], False),  # as in Python
    ("assert set(f(1)) == {1, 2}", {2, 1}, True), ("assert f(1) is None", None, True), ("assert f(1)", True, True),
    ("assert not f(1)", False, True), ("x = 5\nassert f(x) == 3, 'with a message'", 3, True),
])  # fmt: skip
def test_an_assert_of_a_value_is_compared_outside(code: str, value: object, is_passed: bool) -> None:
    (case,) = read_cases({"assert_case": [code]})
    assert case.kind == "outside" and "== 3" not in case.suffix
    assert passed(case, value) == is_passed


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


def test_two_results_are_none() -> None:
    (case,) = read_cases({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]})
    assert not case.is_passed_by(f"\n{case.marker} 2\n{case.marker} 1\n")


@pytest.mark.parametrize("tests", [
    [], {}, {"inputs": ["1"], "outputs": []}, {"inputs": "", "outputs": "", "assert_case": ""},
    {"inputs": "", "outputs": [1]}, {"inputs": [], "outputs": []}, {"assert_case": [1]},
    {"assert_case": "assert f(1) == 2"}, {"inputs": "3\n", "outputs": "6\n"}, {"inputs": ["3", "4"], "outputs": "68"},
    {"fn_name": "f", "inputs": [3], "outputs": [6]}, {"fn_name": "f", "inputs": [{"a": 3}], "outputs": [6]},
    {"fn_name": "a b", "inputs": ["1"], "outputs": ["1"]}, {"fn_name": "f", "inputs": ["x"], "outputs": ["1"]},
])  # fmt: skip
def test_tests_of_another_schema_are_refused(tests: object) -> None:
    with pytest.raises(ValueError):
        read_cases(tests)


@pytest.mark.parametrize(("said", "program"), [
    ("first\n```python\na = 1\n```\nthen\n```py\nx = 1\n```\nand\n```json\n{}\n```\nend", "x = 1\n"),
    ("no code", None), ("```\nx\n```", "x\n"),
    *((f"{prose}```python\nx = 1\n```", "x = 1\n") for prose in (  # fences in prose and drafts in thoughts
        "use ``` quotes, then\n", "The prompt said wrap in ```.\n\n", "``` is the fence. ", "<think>hm</think>",
        "say ```x``` and\n",
    )),
    ("<think>```python\ndraft\n``` wrong</think>\n```\nx = 1\n```", "x = 1\n"),
    *((said, "x = 1\n") for said in (
        "```python\nx = 1\n```\nOutput:\n```\n1\n```", "``` python\nx = 1\n```", "```py3\nx = 1\n```",
        "```python title=a.py\nx = 1\n```", "```python\r\nx = 1\r\n```\r\n", "1. so\n   ```python\n   x = 1\n   ```",
        "```Python\nx = 1\n```", "```{.python}\nx = 1\n```", "so:\n```\nx = 1\n```",
        "say ```x``` here\n```python\nx = 1\n```", "```\ny = 2\n```\n```python\nx = 1\n```",
    )),
])  # fmt: skip
def test_the_last_block_of_the_language_is_the_program_however_it_is_written(said: str, program: str | None) -> None:
    assert find_program(said, CodeSettings()) == program


@pytest.mark.parametrize(("expected", "value", "is_right"), [
    ({"1": 2}, {1: 2}, True), ({"1": 2}, {"1": 2}, True), ({"1": 2}, {1: 3}, False), ([{"-1": [2]}], {-1: [2]}, True),
    ({"1": 2, "a": 3}, {1: 2, "a": 3}, False), ({"01": 2}, {1: 2}, False), ([[{"0": {"5": 1}}]], [{0: {5: 1}}], True),
])
def test_a_mapping_with_whole_numbers_as_keys_is_what_json_has_as_text(
    expected: object, value: object, is_right: bool
) -> None:
    (case,) = read_cases({"fn_name": "f", "inputs": ["1"], "outputs": [json.dumps(expected)]})
    assert passed(case, value) == is_right


@pytest.mark.parametrize("future", [
    "from __future__ import annotations", "from __future__ import (\n    annotations,\n    division,\n)",
    '"""Adds."""\nfrom __future__ import annotations  # so', "from __future__ import annotations; import os",
])
def test_an_answer_with_an_import_of_the_future_has_the_other_imports(future: str) -> None:
    program = f"{future}\ndef f(x: List[int]): return gcd(*x)\nif __name__ == '__main__': raise ValueError\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    before = dict(sys.modules)
    try:
        exec(whole_program(program, Case(suffix="found = f([8, 12])"), CodeSettings()), names)
    finally:
        sys.modules.pop("answer", None)
        sys.modules.update(before)
    assert names["found"] == 4
