"""Values that leave a contained program as JSON, and the comparison of what a program prints.

Only plain values come out: an object of a class of the answer's own is refused, or is what the plain type that it
inherits from holds, or the items that it yields. So no method of the answer takes part in a comparison.
"""

from __future__ import annotations

import math
from typing import Any

from rollout_server.rewards.code.plain import Items, dictionary, members

ENCODE = '''
import builtins as _builtins
def _encode_result(value):
    import json
    from builtins import TypeError, bytearray, bytes, complex, dict, float, frozenset, hasattr, int, isinstance, list
    from builtins import set, str, tuple, type
    def plain(v):
        if v is None or v is True or v is False: return v
        if isinstance(v, str): return str.__str__(v)
        if isinstance(v, int): return int.__int__(v)
        if isinstance(v, float): return ["float", float.__repr__(v)]
        if isinstance(v, complex): return ["complex", complex.__repr__(v)]
        if isinstance(v, bytes): return ["bytes", bytes.hex(v)]
        if isinstance(v, bytearray): return ["bytes", bytearray.hex(v)]
        if isinstance(v, list): return ["list", [plain(x) for x in list.__iter__(v)]]
        if isinstance(v, tuple): return ["tuple", [plain(x) for x in tuple.__iter__(v)]]
        if isinstance(v, set): return ["set", [plain(x) for x in set.__iter__(v)]]
        if isinstance(v, frozenset): return ["set", [plain(x) for x in frozenset.__iter__(v)]]
        if isinstance(v, dict): return ["dict", [[plain(k), plain(x)] for k, x in dict.items(v)]]
        if hasattr(v, "tolist"): return plain(v.tolist())
        if hasattr(v, "__iter__"): return ["items", [plain(x) for x in v]]
        raise TypeError("the result is of the type " + type(v).__name__)
    return json.dumps(plain(value))
'''
"""The code of a function that returns a value as JSON, with tags for the types that JSON does not have. An answer may
have things of its own by the names of builtins, so that the code after it takes these from their module."""

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""The tolerances for numbers with a fraction that a program prints: those of verl's checker."""


def decode(coded: Any) -> Any:
    """Return the value that `_encode_result` has written.

    Raises:
        ValueError, TypeError: it has not written this.
    """
    if not isinstance(coded, list):
        return coded
    tag, content = coded
    match tag:
        case "float":
            return float(content)
        case "complex":
            return complex(content)
        case "bytes":
            return bytes.fromhex(content)
        case "list":
            return [decode(each) for each in content]
        case "tuple":
            return tuple(decode(each) for each in content)
        case "items":
            return Items(tuple(decode(each) for each in content))
        case "set":
            return members(decode(each) for each in content)
        case "dict":
            return dictionary([(decode(key), decode(each)) for key, each in content])
    raise ValueError(f"unknown type {tag!r}")


def without_tuples(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON has only lists."""
    if isinstance(value, list | tuple):
        return [without_tuples(each) for each in value]
    if isinstance(value, dict):
        return {key: without_tuples(each) for key, each in value.items()}
    return value


def is_equal_output(output: str, expected: str) -> bool:
    """Return whether two outputs have the same words in the same lines, but for blank ends of lines and of the text.

    A number with a fraction may differ by 1e-5 of its size.
    """
    got, wanted = _lines(output), _lines(expected)
    return len(got) == len(wanted) and all(map(_is_equal_line, got, wanted))


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _is_equal_line(got: list[str], wanted: list[str]) -> bool:
    return got == wanted or (len(got) == len(wanted) and all(map(_is_equal_word, got, wanted)))


def _is_equal_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    try:
        numbers = float(got), float(wanted)
    except ValueError:
        return False
    has_fraction = "." in wanted or "e" in wanted.lower()
    return has_fraction and all(map(math.isfinite, numbers)) and math.isclose(
        *numbers, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE
    )
