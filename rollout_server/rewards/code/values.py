"""Values that leave a sandbox as JSON, and the comparison of what a program prints.

Only plain values come out: an object of a class of the answer's own is refused, or is what the plain type that it
inherits from holds, or the items that it yields. So no method of the answer takes part in a comparison.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

ENCODE = '''
import builtins as _builtins
def _encode_result(v):
    from builtins import TypeError, bytearray, bytes, complex, dict, float, frozenset, hasattr, int, isinstance, list
    from builtins import set, str, tuple, type
    def join(items): return "[" + ",".join(list(items)) + "]"
    if v is None: return "null"
    if v is True: return "true"
    if v is False: return "false"
    if isinstance(v, str): return '["str","' + str.encode(v, "utf-8", "surrogatepass").hex() + '"]'
    if isinstance(v, int): return int.__repr__(v)
    if isinstance(v, float): return '["float","' + float.__repr__(v) + '"]'
    if isinstance(v, complex): return '["complex","' + complex.__repr__(v) + '"]'
    if isinstance(v, bytes): return '["bytes","' + bytes.hex(v) + '"]'
    if isinstance(v, bytearray): return '["bytes","' + bytearray.hex(v) + '"]'
    for kind in (list, tuple, set, frozenset):
        if isinstance(v, kind):
            return '["' + kind.__name__ + '",' + join(_encode_result(x) for x in kind.__iter__(v)) + "]"
    if isinstance(v, dict):
        return '["dict",' + join(join((_encode_result(k), _encode_result(x))) for k, x in dict.items(v)) + "]"
    if hasattr(v, "tolist"): return _encode_result(v.tolist())
    if hasattr(v, "__iter__"): return '["items",' + join(_encode_result(x) for x in v) + "]"
    raise TypeError("the result is of the type " + type(v).__name__)
'''
"""The code of a function that returns a value as JSON, with tags for the types that JSON does not have. It imports
nothing that starts slowly. The answer before it may have given the names of builtins to things of its own."""
MOST_COLLISIONS = 100
"""The most members of a set or dictionary with one hash; to make one takes time that grows as the square of it."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""The tolerances for numbers with a fraction that a program prints, as in verl's checker."""


class Items(tuple[Any, ...]):
    """The items of an iterable that is no list, tuple or set: of a range, a generator, a view. No list is equal to it.
    """

    __slots__ = ()
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


def decode(coded: Any) -> Any:
    """Return the value that `_encode_result` has written, once read as JSON.

    Raises:
        ValueError, TypeError: it has not written this.
    """
    if not isinstance(coded, list):
        return coded
    tag, content = coded
    match tag:
        case "str" | "bytes":
            data = bytes.fromhex(content)
            return data if tag == "bytes" else data.decode("utf-8", "surrogatepass")
        case "float" | "complex":
            return {"float": float, "complex": complex}[tag](content)
        case "list" | "tuple" | "items":
            return {"list": list, "tuple": tuple, "items": Items}[tag](decode(each) for each in content)
        case "set" | "frozenset":
            return members(decode(each) for each in content)
        case "dict":
            pairs = [(decode(key), decode(value)) for key, value in content]
            members(key for key, _ in pairs)
            return dict(pairs)
    raise ValueError(f"unknown type {tag!r}")


def members(items: Iterable[Any] = ()) -> set[Any]:
    """Return the items as a set. ValueError: too many of them have the same hash."""
    by_hash: dict[int, list[Any]] = {}
    for each in items:
        same = by_hash.setdefault(hash(each), [])
        if each not in same:
            same.append(each)
            if len(same) > MOST_COLLISIONS:
                raise ValueError("too many values have the same hash")
    return {each for same in by_hash.values() for each in same}


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
    got, wanted = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    is_alike = list(map(len, got)) == list(map(len, wanted))
    return is_alike and all(map(_is_equal_word, itertools.chain(*got), itertools.chain(*wanted)))


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
