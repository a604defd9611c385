"""Evaluates expressions on plain values: numbers, texts, lists, tuples, sets and dictionaries.

It interprets the kinds of expression that tests have around a call, by lists of what is allowed, and runs no code. The
values come from programs of others, so all work is bounded.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 100_000
"""The most expressions that one evaluation has, each turn of a comprehension counted."""
MOST_ITEMS = 100_000
"""The most items of a sequence that an operator or a range makes."""
MOST_COLLISIONS = 100
"""The most members of a set or dictionary with one hash; to make one takes time that grows as the square of it."""
_LARGEST_EXPONENT, _MOST_DIGITS = 64, 400


@dataclass(frozen=True, slots=True)
class Items:
    """The items of an iterable that is no list, tuple or set: of a range, a generator, a view. No list is equal to it.
    """

    items: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def members(items: Iterable[Any] = ()) -> set[Any]:
    """Return the items as a set.

    Raises:
        ValueError: too many of them have the same hash.
    """
    by_hash: dict[int, list[Any]] = {}
    for each in items:
        same = by_hash.setdefault(hash(each), [])
        if each not in same:
            same.append(each)
            if len(same) > MOST_COLLISIONS:
                raise ValueError("too many values have the same hash")
    return {each for same in by_hash.values() for each in same}


def dictionary(items: Any = ()) -> dict[Any, Any]:
    """Return the pairs of a list, or those of another dictionary, as a dictionary. ValueError: as in `members`."""
    pairs = list(items.items() if isinstance(items, Mapping) else items)
    members(key for key, _ in pairs)
    return dict(pairs)


def _count(items: Any = ()) -> Counter[Any]:
    counted = items if isinstance(items, Mapping) else list(items)
    members(counted)
    return Counter(counted)


def _range(*bounds: int) -> range:
    if len(found := range(*bounds)) > MOST_ITEMS:
        raise ValueError(f"the range has {len(found)} items")
    return found


def _zip(*iterables: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the tuples of zip. ValueError: one is shorter, so that a value that lacks items would go unnoticed."""
    return list(zip(*iterables, strict=True))


def _product(a: Any, b: Any) -> Any:
    for sequence, times in ((a, b), (b, a)):
        if isinstance(sequence, Sequence) and len(sequence) * times > MOST_ITEMS:
            raise ValueError(f"the sequence has {len(sequence) * times} items")
    return a * b


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(f"the exponent is {exponent}")
    return base**exponent


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, str | bytes):  # it would be a format, which may ask for any width
        raise TypeError("a text has no remainder")
    return a % b


def _round(number: Any, digits: int | None = None) -> Any:
    if digits is not None and abs(digits) > _MOST_DIGITS:
        raise ValueError(f"it is rounded to {digits} digits")
    return round(number, digits)


def _sum(items: Iterable[Any], start: Any = 0) -> Any:
    if isinstance(start, list | tuple):  # it would copy all of the sum for each item
        raise TypeError("sequences are not summed")
    return sum(items, start)


def _of_sets(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of numbers, sets and dictionaries, which makes no set of another value."""

    def operate(a: Any, b: Any) -> Any:
        if isinstance(a, list | tuple | str | Items) or isinstance(b, list | tuple | str | Items):
            raise TypeError("only numbers, sets and dictionaries have this operator")
        return function(a, b)

    return operate


def _is(a: Any, b: Any) -> bool:
    """Return whether two values are one and the same, as far as a value that came as JSON can be."""
    return type(a) is type(b) and bool(a == b)


_MATH = ("isclose", "fabs", "floor", "ceil", "sqrt", "isnan", "isinf")
_CALLS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "float": float, "int": int, "isinstance": isinstance, "len": len,
    "list": list, "max": max, "min": min, "range": _range, "round": _round, "sorted": sorted, "str": str, "sum": _sum,
    "tuple": tuple, "type": type, "zip": _zip, "enumerate": enumerate, "complex": complex, "dict": dictionary,
    "set": members, "frozenset": lambda items=(): frozenset(members(items)), "Counter": _count,
    "collections.Counter": _count, **{f"{root}{name}": getattr(math, name) for name in _MATH for root in ("", "math.")},
}  # fmt: skip
"""The functions that may be called."""
_VALUES: dict[str, Any] = {
    **{each.__name__: each for each in (int, float, str, bool, list, tuple, dict, set, complex, len, abs)},
    **{f"{root}{name}": getattr(math, name) for name in ("pi", "inf", "nan") for root in ("", "math.")},
}
"""The names that may stand alone: types, keys to sort by, numbers."""
_METHODS = frozenset({
    "keys", "values", "items", "get", "startswith", "endswith", "lower", "upper", "strip", "split", "count", "index",
    "join",
})  # fmt: skip
"""The methods of plain values that may be called."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: _is, ast.IsNot: lambda a, b: not _is(a, b), ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _product,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: _remainder, ast.Pow: _power,
    ast.BitAnd: _of_sets(operator.and_), ast.BitOr: _of_sets(operator.or_), ast.BitXor: _of_sets(operator.xor),
    ast.Not: operator.not_,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}
_NODES = (
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice,
    ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.comprehension, ast.keyword, ast.boolop, ast.expr_context,
    *_OPERATORS,
)  # fmt: skip


def can_evaluate(expression: ast.expr, names: Collection[str]) -> bool:
    """Return whether `evaluate` knows all that is in an expression, if values for `names` are given."""
    bound = {each.id for each in ast.walk(expression) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}

    def is_known(node: ast.AST) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(name):
                return name in names or name in bound or name in _VALUES
            case ast.Attribute():
                return name_of(node) in _VALUES
            case ast.Call(function, arguments, keywords):
                is_method = isinstance(function, ast.Attribute) and function.attr in _METHODS
                return (
                    (name_of(function) in _CALLS or (is_method and is_known(function.value)))  # type: ignore[attr-defined]
                    and all(map(is_known, arguments)) and all(each.arg and is_known(each) for each in keywords)
                )
            case ast.Dict(keys) if None in keys:  # {**other}
                return False
        return isinstance(node, _NODES) and all(map(is_known, ast.iter_child_nodes(node)))

    return is_known(expression)


def name_of(node: ast.AST) -> str:
    """Return the name that an expression is, such as `abs` or `math.isclose`; "": it is none."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def evaluate(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression that `can_evaluate` knows.

    Raises:
        ValueError: it takes too much work.
        Exception: it fails, as it would in Python.
    """
    return _Evaluation().of(expression, values)


class _Evaluation:
    """Evaluates one expression, and counts the steps."""

    def __init__(self) -> None:
        self._steps = itertools.count()

    def of(self, node: ast.AST | None, names: Mapping[str, Any]) -> Any:
        """Return the value of a node, None of None."""
        if next(self._steps) > MOST_STEPS:
            raise ValueError(f"it takes more than {MOST_STEPS} steps")

        def several(nodes: Iterable[ast.AST | None]) -> list[Any]:
            return [self.of(each, names) for each in nodes]

        match node:
            case None:
                return None
            case ast.Constant(value):
                return value
            case ast.Name() | ast.Attribute():
                name = name_of(node)
                return names[name] if name in names else _VALUES[name]
            case ast.List(items):
                return several(items)
            case ast.Tuple(items):
                return tuple(several(items))
            case ast.Set(items):
                return members(several(items))
            case ast.Dict(keys, items) if None not in keys:
                return dictionary(zip(several(keys), several(items), strict=True))
            case ast.Subscript(value, index):
                return self.of(value, names)[self.of(index, names)]
            case ast.Slice(lower, upper, step):
                return slice(*several((lower, upper, step)))
            case ast.UnaryOp(sign, value):
                return _OPERATORS[type(sign)](self.of(value, names))
            case ast.BinOp(left, sign, right):
                return _OPERATORS[type(sign)](self.of(left, names), self.of(right, names))
            case ast.BoolOp(ast.And(), tests):
                return all(self.of(each, names) for each in tests)
            case ast.BoolOp(_, tests):
                return any(self.of(each, names) for each in tests)
            case ast.Compare(left, signs, others):
                found = several((left, *others))
                return all(_OPERATORS[type(s)](a, b) for s, a, b in zip(signs, found, found[1:], strict=False))
            case ast.Call():
                return self._call(node, names)
            case ast.GeneratorExp(value, loops) | ast.ListComp(value, loops):
                return [self.of(value, inner) for inner in self._turns(loops, names)]
            case ast.SetComp(value, loops):
                return members(self.of(value, inner) for inner in self._turns(loops, names))
        raise TypeError(f"{type(node).__name__} is not evaluated")

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        arguments = [self.of(each, names) for each in node.args]
        keywords = {str(each.arg): self.of(each.value, names) for each in node.keywords}
        if function := _CALLS.get(name_of(node.func)):
            return function(*arguments, **keywords)
        assert isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        owner = self.of(node.func.value, names)
        if not isinstance(owner, str | list | tuple | dict | set | frozenset):
            raise TypeError(f"{type(owner).__name__} has no methods here")
        return getattr(owner, node.func.attr)(*arguments, **keywords)

    def _turns(self, loops: list[ast.comprehension], names: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the names in each turn of the loops of a comprehension."""
        loop, *inner = loops
        for item in self.of(loop.iter, names):
            bound = {**names, **_bound(loop.target, item)}
            if all(self.of(test, bound) for test in loop.ifs):
                yield from self._turns(inner, bound) if inner else [bound]


def _bound(target: ast.expr, value: Any) -> dict[str, Any]:
    """Return the names that an assignment to `target` binds. ValueError: the value has another shape."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, ast.Tuple | ast.List):
        raise ValueError(f"{type(target).__name__} is not bound")
    pairs = zip(target.elts, value, strict=True)
    return {name: each for part, item in pairs for name, each in _bound(part, item).items()}
