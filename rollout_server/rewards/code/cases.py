"""Turns the tests of a question, in one of verl's schemas, into programs to run and outcomes to expect.

    {inputs: [text, ...], outputs: [text, ...]}                   a program: what it prints for each input
    {fn_name: name, inputs: [lines of JSON, ...], outputs: [JSON, ...]}   a function, or the method of `Solution`
    {assert_case: [code, ...]}                                    asserts, each appended to the answer

The program of a case never holds what is expected. Its result comes out as text, or as a value in JSON, and is compared
outside of it. Only an assert that can't be taken apart runs inside; it is counted as cheatable.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.rewards.code.values import ENCODE, decode, is_equal_output, without_tuples

_SCHEMAS = "{inputs, outputs}, {fn_name, inputs, outputs} or {assert_case}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a program: what follows the answer, its input, and what must come out."""

    suffix: str = ""
    """The code after the answer. It prints a line with `marker` and the result."""
    stdin: str = ""
    marker: str = ""
    """The word before the result in the output; empty: all of the output is the result."""
    expected: Any = None
    """The expected output or value; the marker itself for asserts that run inside."""
    kind: str = "output"
    """output, value (of a function), literal (of an assert) or inside (an assert that runs inside)."""

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
            value = decode(json.loads(result))
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        try:
            if self.kind == "value":
                value, first = without_tuples(value), self.expected
                # As in verl, a list with one value stands for that value too.
                wrapped = isinstance(first, list) and bool(first) and value == first[0]
                return bool(value == first) or wrapped
            return bool(value == self.expected)
        except RecursionError:
            return False


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the cases of a question.

    Raises:
        ValueError: the ground truth has none of the schemas, or no test.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests must be {_SCHEMAS}, got {type(tests).__name__}")
    if tests.get("assert_case"):
        return [_assert_case(_text(code)) for code in tests["assert_case"]]
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
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


def _call_case(name: str, given: Any, output: Any) -> Case:
    """Return the case of a call, whose arguments are lines of JSON, or a list of them."""
    if not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {name!r}")
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    marker = secrets.token_hex(8)
    call = (
        f"(Solution().{name} if 'Solution' in globals() and hasattr(globals()['Solution'], {name!r}) else {name})"
        f"(*__import__('json').loads({json.dumps(arguments)!r}))"
    )
    expected = json.loads(output) if isinstance(output, str) else output
    return Case(suffix=_printing(marker, call), marker=marker, expected=expected, kind="value")


def _assert_case(code: str) -> Case:
    """Return the case of code that ends with an assert of one value, or else of code that runs inside."""
    marker = secrets.token_hex(8)
    tree = ast.parse(code)
    *before, last = tree.body or [ast.Pass()]
    has_other_asserts = any(isinstance(node, ast.Assert) for each in before for node in ast.walk(each))
    if isinstance(last, ast.Assert) and not has_other_asserts:
        expression, expected = _taken_apart(last.test)
        if expression is not None:
            setup = "\n".join(ast.unparse(each) for each in before)
            suffix = f"{setup}\n{_printing(marker, ast.unparse(expression))}"
            return Case(suffix=suffix, marker=marker, expected=expected, kind="literal")
    suffix = f"{code}\nprint('\\n{marker} passed', flush=True)"
    return Case(suffix=suffix, marker=marker, kind="inside")


def _taken_apart(test: ast.expr) -> tuple[ast.expr | None, Any]:
    """Return (the expression to evaluate, the literal that it must equal), or (None, None)."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        for expression, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return expression, ast.literal_eval(literal)
            except (ValueError, TypeError, MemoryError, RecursionError):
                continue
        return None, None
    if isinstance(test, ast.Compare):
        return None, None
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    inner = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if isinstance(inner, ast.Call):
        return ast.Call(ast.Name("bool", ast.Load()), [inner], []), not negated
    return None, None


def _printing(marker: str, expression: str) -> str:
    """Return code that prints the value of an expression."""
    return f"{ENCODE}\nprint('\\n{marker} ' + _encode_result({expression}), flush=True)"


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(code: Any) -> str:
    if not isinstance(code, str):
        raise ValueError(f"assert_case must be a list of code, got {code!r:.80}")
    return code
