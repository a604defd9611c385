"""A calculator as a tool: `task.tools: [rollout_server.episodes.tools.calculator:calculate]`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

MAX_CHARACTERS = 300
MAX_BITS = 2048
"""The largest allowed size of a power. It keeps 9**9**9 from costing time and memory."""
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, e.g. (12 + 3) * 4.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression must have at most {MAX_CHARACTERS} characters, got {len(expression)}")
    try:
        tree = ast.parse(_THOUSANDS.sub("", expression).strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the parser raises the last two for deep nesting
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree.body)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, complex) or not math.isfinite(value):
        raise ValueError("the result must be a finite real number")
    return f"{value:.12g}"


def _value(node: ast.expr) -> float:
    """Return the value of a node of the syntax tree. Raises ValueError if it is neither a number nor arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left), _value(right))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses are allowed, got {ast.unparse(node)[:40]!r}")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"the power is too large: it must have at most {MAX_BITS} bits")
    result: float = base**exponent
    return result
