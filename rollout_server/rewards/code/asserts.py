"""Takes asserts apart: calls of the answer's functions run in its process, all that is around them is evaluated here.

    assert abs(f(3) - 0.5) < 1e-6        f(3) runs beside the answer, and its value comes out as JSON;
                                         abs(_0 - 0.5) < 1e-6 is evaluated by `plain`, where nothing of the answer is

So neither what is expected nor a comparison is in the answer's process. An assert is taken apart if each of its parts
that `and`, `or` and `not` join has one value of the answer's, or none, and besides only what `plain` knows.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout_server.rewards.code.plain import can_evaluate, evaluate

IMPORTS = (
    "import bisect, collections, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys; "
    "from typing import *; from collections import *; from functools import *; from heapq import *; "
    "from itertools import *; from bisect import *; from math import *; from builtins import *"
)
"""The imports that a program has before the answer, as verl's checker has them. The last gives `pow` back: that of math
takes no third argument and returns floats."""
KEEP = "_keep_result"
"""The function that is called with each value of the answer's, in the code that `take_apart` returns."""


def _names_of_imports() -> frozenset[str]:
    names: dict[str, object] = {}
    exec(IMPORTS, names)
    return frozenset(names)


_PROVIDED = _names_of_imports() | frozenset(dir(builtins))
"""The names that a program has without the answer."""
_OF_OBJECTS = ("str", "repr", "next")
"""Functions that only call a method of an object, and so belong to the answer's process."""


@dataclass(frozen=True, slots=True)
class TakenApart:
    """Asserts, and what runs beside the answer for them."""

    code: str
    """The code with `KEEP(value)` for each value of the answer's in an assert, and without asserts."""
    tests: tuple[ast.expr, ...]
    """The asserts, with the names _0, _1, ... for these values, in the order in which they are kept."""
    num_values: int

    def is_passed_by(self, values: list[Any]) -> bool:
        """Return whether the asserts hold with these values."""
        if len(values) != self.num_values:
            return False
        names = {f"_{number}": value for number, value in enumerate(values)}
        try:
            return all(evaluate(test, names) for test in self.tests)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
            return False


def take_apart(code: str) -> TakenApart | None:
    """Return the asserts in code, taken apart; None: one of them can't be, or none has a value of the answer's.

    The asserts may stand at the top, or in a function `check(candidate)` that the last line calls.
    """
    for owns_provided in (False, True):  # an answer may be asked for a function `sum`, if nothing else can be its own
        tree = ast.parse(code)
        check = _function_of_the_last_line(tree)
        blocks = [tree.body, *([check.body] if check else [])]
        asserts = [each for block in blocks for each in block if isinstance(each, ast.Assert)]
        if not asserts or len(asserts) != sum(isinstance(each, ast.Assert) for each in ast.walk(tree)):
            return None
        owned = _Owned(tree, blocks, check.args.args[0].arg if check else "", owns_provided)
        if any(map(owned.is_call, ast.walk(tree))) and "*" not in owned.bound:
            taken = _taken_apart(tree, blocks, owned)
            return taken if taken and taken.num_values else None
    return None


def _function_of_the_last_line(tree: ast.Module) -> ast.FunctionDef | None:
    """Return the function of the code that its last line calls with one argument, and nothing else does."""
    match tree.body[-1:]:
        case [ast.Expr(ast.Call(ast.Name(name), [_], []))]:
            pass
        case _:
            return None
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    uses = sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(tree))
    if len(found) != 1 or uses != 1 or found[0].decorator_list:
        return None
    given = found[0].args
    others = (given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg)
    ends_early = any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) for each in ast.walk(found[0]))
    return found[0] if len(given.args) == 1 and not any(others) and not ends_early else None


def _taken_apart(tree: ast.Module, blocks: list[list[ast.stmt]], owned: _Owned) -> TakenApart | None:
    tests, num_values = [], 0
    for block in blocks:
        kept: list[ast.stmt] = []
        for statement in block:
            if not isinstance(statement, ast.Assert):
                kept.append(statement)
                continue
            parts = _Parts(owned, num_values)
            try:
                tests.append(parts.test(statement.test))
            except _CanNotBeTakenApartError:
                return None
            kept += [ast.Expr(ast.Call(ast.Name(KEEP, ast.Load()), [each], [])) for each in parts.values]
            num_values += len(parts.values)
        block[:] = kept or [ast.Pass()]
    return TakenApart(ast.unparse(ast.fix_missing_locations(tree)), tuple(tests), num_values)


class _CanNotBeTakenApartError(Exception):
    pass


class _Owned:
    """Tells which expressions of a test have a value of the answer's.

    Args:
        candidate: the name that stands for the answer's function, which alone is called then; empty: every name that is
            neither the test's nor provided is the answer's.
        owns_provided: whether the answer has functions with names that are provided.
    """

    def __init__(
        self, tree: ast.Module, blocks: list[list[ast.stmt]], candidate: str, owns_provided: bool
    ) -> None:
        self._candidate, self._owns_provided = candidate, owns_provided
        bound = Counter(_bound_names(tree))
        self.bound = frozenset(bound)
        """The names that the test gives a meaning."""
        self._inputs: set[str] = set()
        """Variables of the test that began with a literal, which calls may have changed."""
        self._results: set[str] = set()
        """Variables with a result of a function of the answer's."""
        self._objects: set[str] = set()
        """Variables with an object of a class of the answer's."""
        self._derived: set[str] = set()
        """Variables that were computed with a result."""
        for statement in (each for block in blocks for each in block):
            if any(self._is_result(each) for each in ast.walk(statement)):
                self._derived.update(
                    each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and _is_stored(each)
                )
            match statement:
                case ast.Assign([ast.Name(name)], value) if bound[name] == 1:
                    if _is_literal(value):
                        self._inputs.add(name)
                    elif self._constructs(value):
                        self._objects.add(name)
                    elif self.is_call(value) and not self.has_result_within(value):
                        self._results.add(name)

    def has(self, node: ast.AST) -> bool:
        """Return whether an expression is a value of the answer's, which it may have made as it likes."""
        match node:
            case ast.Name(name, ast.Load()):
                return name in self._inputs or name in self._results
            case ast.Attribute(owner, name):
                is_object = isinstance(owner, ast.Name) and owner.id in self._objects
                return not name.startswith("__") and (is_object or self.has(owner))
            case ast.Call(ast.Name(name), [argument], []) if name in _OF_OBJECTS and name not in self.bound:
                is_object = isinstance(argument, ast.Name) and argument.id in self._objects
                return is_object or self.has(argument)
            case ast.Call():
                return self.is_call(node)
        return False

    def has_result_within(self, value: ast.expr) -> bool:
        """Return whether a call has a result of another one among its arguments, so that it may be a comparison."""
        return not self._candidate and any(self._is_result(each) for each in ast.walk(value) if each is not value)

    def _is_result(self, node: ast.AST) -> bool:
        """Return whether a node is a call of a function of the answer's, or a variable that depends on one."""
        if isinstance(node, ast.Name):
            return node.id in self._derived and not _is_stored(node)
        return self.is_call(node) and not self._constructs(node)

    def is_call(self, node: ast.AST) -> bool:
        """Return whether a node is a call of a function of the answer's, or of a method of its objects."""
        match node:
            case ast.Call(ast.Name(name), arguments):
                if self._candidate or name in self.bound:
                    return name == self._candidate
                has_calls = any(isinstance(each, ast.Call) for given in arguments for each in ast.walk(given))
                return name not in _PROVIDED or (self._owns_provided and not has_calls)
            case ast.Call(ast.Attribute(ast.Name(owner), name)) if owner in self._objects:
                return not name.startswith("__")
            case ast.Call(ast.Attribute(owner, name)) if self._constructs(owner):
                return not name.startswith("__")
        return False

    def _constructs(self, node: ast.AST) -> bool:
        """Return whether a node makes an object of a class of the answer's, as its name with a capital says."""
        match node:
            case ast.Call(ast.Name(name)):
                return name[:1].isupper() and self.is_call(node)
        return False


def _is_stored(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that code binds, once for each time."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) if _is_stored(node):
                yield name
            case ast.arg(name):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Import(aliases):
                yield from (each.asname or each.name.partition(".")[0] for each in aliases if not _is_usual("", each))
            case ast.ImportFrom(module, aliases):
                yield from (each.asname or each.name for each in aliases if not _is_usual(module or "", each))


def _is_usual(module: str, alias: ast.alias) -> bool:
    """Return whether an import gives a name that is provided the meaning that it has."""
    return not alias.asname and (module in ("math", "collections") or (not module and alias.name in _PROVIDED))


class _Parts(ast.NodeTransformer):
    """Takes one assert apart, with names from `_{first}` on for its values."""

    def __init__(self, owned: _Owned, first: int) -> None:
        self._owned, self._first = owned, first
        self.values: list[ast.expr] = []
        """The values of the answer's."""

    def test(self, node: ast.expr) -> ast.expr:
        """Return a test with names in the place of values."""
        match node:
            case ast.BoolOp(operator, tests):
                return ast.BoolOp(operator, [self.test(each) for each in tests])
            case ast.UnaryOp(ast.Not(), inner):
                return ast.UnaryOp(ast.Not(), self.test(inner))
        before = len(self.values)
        part: ast.expr = self.visit(node)
        values = self.values[before:]
        names = {each.id for each in ast.walk(part) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        loops = {each.id for each in ast.walk(part) if isinstance(each, ast.Name) and _is_stored(each)}
        of_loops = any(isinstance(each, ast.Name) and each.id in loops for value in values for each in ast.walk(value))
        may_compare = any(map(self._owned.has_result_within, values)) and not _expects_more_than_yes_or_no(part)
        if len(values) > 1 or of_loops or may_compare or names & (self._owned.bound - loops):
            raise _CanNotBeTakenApartError
        if not can_evaluate(part, [f"_{self._first + number}" for number in range(len(self.values))]):
            raise _CanNotBeTakenApartError
        if isinstance(part, ast.Name) and values:  # only its truth counts, which any object has
            self.values[-1] = ast.Call(_builtin("bool"), values, [])
        return part

    def visit(self, node: ast.AST) -> Any:
        if not (isinstance(node, ast.expr) and self._owned.has(node)):
            return super().visit(node)
        for each in ast.walk(node):
            match each:
                case ast.Call(ast.Name(name)) if name in _OF_OBJECTS and name not in self._owned.bound:
                    if not self._owned.is_call(each):
                        each.func = _builtin(name)
        self.values.append(node)
        return ast.Name(f"_{self._first + len(self.values) - 1}", ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Take the parts of a call of another function; a method of a value is no value of its own."""
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        return node


def _builtin(name: str) -> ast.expr:
    """Return an expression for a builtin whose name the answer may have given to a thing of its own; see ENCODE."""
    return ast.Attribute(ast.Name("_builtins", ast.Load()), name, ast.Load())


def _expects_more_than_yes_or_no(part: ast.expr) -> bool:
    constants = (each.value for each in ast.walk(part) if isinstance(each, ast.Constant))
    return any(each is not None and each not in (0, 1) for each in constants)
