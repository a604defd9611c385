"""Tells scorers of reasoning_gym that only compare an answer from those that might run it as code or take for ever.

A scorer is trusted, an answer is not. So it is enough to look at the names in the code of a scorer: `eval(answer)` has
the name `eval`, and so has all else that runs a text. A name that is not known counts as harmful.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType
from typing import Any

_HARMLESS = frozenset({
    "AttributeError", "Decimal", "Exception", "IndexError", "KeyError", "TypeError", "ValueError", "abs", "all", "any",
    "bool", "enumerate", "float", "get", "isinstance", "items", "join", "keys", "len", "list", "lower", "lstrip", "max",
    "min", "range", "replace", "rstrip", "set", "sorted", "split", "splitlines", "startswith", "str", "strip", "sum",
    "title", "tuple", "upper", "values", "zip",
})  # fmt: skip
"""Names of functions and methods that take a short time for any text, and run none.

`int` is not among them: a number that an answer names, as in `10 ** int(answer)`, may keep a scorer busy for ever. Nor
is anything of `re`, whose patterns may, nor of `json` or numpy."""
_PACKAGE = "reasoning_gym"


def only_compares(scorer: Any) -> bool:
    """Return whether a scorer, and the functions of its package that it calls, use nothing but harmless names."""
    todo: list[Any] = [scorer]
    seen: set[FunctionType] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function.__closure__:  # a closure may hold any other function
            return False
        if function in seen:
            continue
        seen.add(function)
        found = {name: function.__globals__.get(name) for name in _names(function.__code__) - _HARMLESS}
        modules = [value for value in found.values() if _is_own_module(value)]
        for name, value in found.items():
            if value is None:  # no global: an attribute, perhaps of one of the modules
                todo.append(next((getattr(module, name) for module in modules if hasattr(module, name)), None))
            elif not _is_own_module(value):
                todo.append(value)
    return True


def _names(code: CodeType) -> set[str]:
    """Return the names of all globals and attributes that a code and those within it use."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_own_module(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == _PACKAGE
