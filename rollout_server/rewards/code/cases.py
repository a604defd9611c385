"""Turns the tests of a question, in one of verl's schemas, into programs to run and outcomes to expect.

    {inputs: [text, ...], outputs: [text, ...]}                   a program: its output for each input
    {fn_name: name, inputs: [lines of JSON, ...], outputs: [JSON, ...]}   a function, or the method of `Solution`
    {assert_case: [code, ...]}                                    asserts, each appended to the answer

The program of a case never holds what is expected. Its result comes out as text, or as values in JSON, and is compared
outside of it. Only an assert that can't be taken apart runs inside, where a dishonest answer can pass it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.rewards.code.asserts import KEEP, take_apart
from rollout_server.rewards.code.values import ENCODE, decode, is_equal_output, without_tuples

_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,99}")
_SCHEMAS = "{inputs, outputs}, {fn_name, inputs, outputs} or {assert_case}"
CHEATABLE = "runs beside the answer, so that a dishonest answer can pass it"
"""The fault of a cheatable test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a program: what follows the answer, its input, and what must come out."""

    suffix: str = ""
    """The code after the answer. It prints a line with `marker` and the result."""
    stdin: str = ""
    marker: str = ""
    """The word before the result in the output; empty: all of the output is the result."""
    expected: Any = None
    """The expected output or value; the asserts that were taken apart; None for code that runs inside."""
    kind: str = "output"
    """output, value (of a function), outside (asserts that are evaluated outside) or inside (code with asserts)."""

    @property
    def is_cheatable(self) -> bool:
        """Whether the answer can pass without being right, because the comparison runs beside it."""
        return self.kind == "inside"

    def is_passed_by(self, output: str) -> bool:
        """Return whether the output of the program shows the expected result."""
        if self.kind == "output":
            return is_equal_output(output, self.expected)
        before, found, result = output.rpartition(f"\n{self.marker} ")
        if not found or f"\n{self.marker} " in before:  # none, or more than one result
            return False
        if self.kind == "inside":
            return result == "passed\n"
        try:
            coded = json.loads(result)
            if self.kind == "value":
                return _is_expected(without_tuples(decode(coded)), self.expected)
            return isinstance(coded, list) and self.expected.is_passed_by([decode(each) for each in coded])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the cases of a question.

    Raises:
        ValueError: the ground truth has none of the schemas, or no test.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests must be {_SCHEMAS}, got {type(tests).__name__}")
    if asserts := _listed(tests, "assert_case"):
        return [_assert_case(_text(code)) for code in asserts]
    inputs, outputs = _listed(tests, "inputs"), _listed(tests, "outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError(f"tests must be {_SCHEMAS}, with as many outputs as inputs, got keys {sorted(tests)}")
    if not inputs:
        raise ValueError("tests must have at least one case, got none")
    name = tests.get("fn_name")
    if name:
        return [_call_case(str(name), each, output) for each, output in zip(inputs, outputs, strict=True)]
    return [
        Case(stdin=_lines(each), expected=_lines(output)) for each, output in zip(inputs, outputs, strict=True)
    ]


def _listed(tests: Mapping[str, Any], key: str) -> Any:
    """Return what tests have by a key, which is an empty text in a column that a question does not use.

    Raises:
        ValueError: it is one text, so that every letter would be a case.
    """
    listed = tests.get(key)
    if isinstance(listed, str) and listed:
        raise ValueError(f"{key} must be a list with an item for each case, got the text {listed!r:.80}")
    return listed


def first_cheatable(cases: Sequence[Case]) -> str:
    """Return the place of the first cheatable test in the ground truth; "" if there is none."""
    return next((f"assert_case[{number}]" for number, case in enumerate(cases) if case.is_cheatable), "")


def _call_case(name: str, given: Any, output: Any) -> Case:
    """Return the case of a call, whose arguments are lines of JSON, or a list of them."""
    if not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {name!r}")
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"an input of {name} must be lines of JSON, or a list of arguments, got {given!r:.80}")
    marker = secrets.token_hex(8)
    call = (
        f"(Solution().{name} if 'Solution' in _builtins.globals() and _builtins.hasattr(Solution, {name!r}) "
        f"else {name})(*_json.loads({json.dumps(arguments)!r}))"
    )
    suffix = f"import json as _json\n{ENCODE}\n_builtins.print('\\n{marker} ' + _encode_result({call}), flush=True)"
    expected = json.loads(output) if isinstance(output, str) else output
    return Case(suffix=suffix, marker=marker, expected=expected, kind="value")


def _assert_case(code: str) -> Case:
    """Return the case of asserts that are taken apart, or else of code that runs inside."""
    marker = secrets.token_hex(8)
    if taken := take_apart(code):
        keep = f"def {KEEP}(value): _results.append(_encode_result(value))"
        end = f"_builtins.print('\\n{marker} [' + ', '.join(_results) + ']', flush=True)"
        suffix = f"{ENCODE}\n_results = []\n{keep}\n{taken.code}\n{end}"
        return Case(suffix=suffix, marker=marker, expected=taken, kind="outside")
    suffix = f"{code}\nimport builtins as _builtins\n_builtins.print('\\n{marker} passed', flush=True)"
    return Case(suffix=suffix, marker=marker, kind="inside")


def _is_expected(value: Any, expected: Any) -> bool:
    """Return whether a function has returned what is expected; as in verl, [x] stands for x too, and the keys of a
    mapping, which are texts in JSON, for whole numbers.
    """
    meant = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    return any(value == each or value == _with_numbers(each) for each in meant)


def _with_numbers(value: Any) -> Any:
    """Return a value with numbers as keys in each mapping whose keys are all whole numbers in text."""
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    if not isinstance(value, dict):
        return value
    are_numbers = all(isinstance(key, str) and _WHOLE_NUMBER.fullmatch(key) for key in value)
    return {int(key) if are_numbers else key: _with_numbers(each) for key, each in value.items()}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(code: Any) -> str:
    if not isinstance(code, str):
        raise ValueError(f"assert_case must be a list of code, got {code!r:.80}")
    return code
