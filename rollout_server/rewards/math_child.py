"""The child process of `MathChecker`: it reads JSON lines {gold, response, timeout_s} and writes `true` or `false`.

SIGALRM's default action ends the process if a check takes too long; it also interrupts big-integer arithmetic inside C.
The file is run by its path and imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify
from sympy import Eq, Expr, Float, Symbol

_MEMORY_BYTES = 4 * 2**30
_SMALL, _CLOSE = 1e-3, 1e-3
"""Numbers below the first value are equal if their relative difference is at most the second: math-verify compares
six of their decimals."""
_ACCURACY = 1e-14
"""The relative difference allowed between floats for the same number; math-verify compares all digits of large ones."""
_DIGITS = 30
"""The number of digits to which numbers are evaluated."""


def main() -> None:
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing stdin
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            gold = parse(f"\\boxed{{{request['gold']}}}", parsing_timeout=None)
            response = parse(request["response"], parsing_timeout=None)
            is_equal = _is_equal(gold, response)
        except (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError):
            is_equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(is_equal), flush=True)


def _is_equal(gold: list[Any], response: list[Any]) -> bool:
    """Return whether two parsed answers are equal, according to math-verify.

    Two numbers that are small, or one of which has floats, are compared by their relative difference instead. A number
    may have a name, as in `x = 2`, but the two names must not differ.
    """
    verdict = bool(verify(gold, response, timeout_seconds=None))
    parsed = *gold[:1], *response[:1]
    names = {each.lhs for each in parsed if _is_named(each)}
    values = [each.rhs if _is_named(each) else each for each in parsed]
    has_floats = any(isinstance(each, Expr) and each.has(Float) for each in values)
    if gold[:1] == response[:1] or len(names) > 1 or not (verdict or has_floats):
        return verdict
    numbers = [_number(each) for each in values]
    if len(numbers) < 2 or None in numbers:
        return verdict
    difference, size = abs(numbers[0] - numbers[1]), max(map(abs, numbers))
    if size < _SMALL:
        return bool(difference <= _CLOSE * size)
    return verdict or bool(has_floats and difference <= _ACCURACY * size)


def _is_named(parsed: Any) -> bool:
    return isinstance(parsed, Eq) and isinstance(parsed.lhs, Symbol)


def _number(parsed: Any) -> Any:
    """Return a parsed answer as a real number; None if it is not one."""
    try:
        number = parsed.evalf(_DIGITS) if isinstance(parsed, Expr) and parsed.is_number else None
    except Exception:  # sympy raises many kinds, and the verdict stands without the number
        return None
    if not isinstance(number, Float):
        return number if number == 0 else None
    return number if number.is_comparable else 0  # no digit is left of `1 - 1`, which math-verify does not evaluate


if __name__ == "__main__":
    main()
