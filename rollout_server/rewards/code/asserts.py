"""Takes asserts apart: calls of the answer's functions run in its process, all that is around them is evaluated here.

    assert abs(f(3) - 0.5) < 1e-6        f(3) runs beside the answer, and its value comes out as JSON;
                                         abs(_0 - 0.5) < 1e-6 is evaluated outside, where nothing of the answer is

So neither the expected value nor a comparison is in the answer's process. An assert is taken apart if each part that
`and`, `or` and `not` join has one call of the answer's, and otherwise literals, comparisons, +, -, / and `FUNCTIONS`.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout_server.rewards.code.values import members

KEEP = "_keep_result"
"""The function that is called with each value of the answer's, in the code that `take_apart` returns."""
FUNCTIONS = {  # no value takes them long
    "abs": abs, "bool": bool, "float": float, "isclose": math.isclose, "len": len, "list": list, "max": max, "min": min,
    "round": lambda value, digits=0: round(value, max(-400, min(digits, 400))) if digits else round(value),
    "set": members, "sorted": sorted, "sum": lambda values: sum(values), "tuple": tuple,
}  # fmt: skip
_PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.keyword,
    ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Subscript, ast.Slice,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TakenApart:
    """Asserts, and the code that runs beside the answer for them."""

    code: str
    """It has `KEEP(value)` for each value of the answer's in an assert, and no assert."""
    tests: tuple[ast.expr, ...]
    """The asserts, with the names _0, _1, ... for the values, as they are kept."""
    num_values: int

    def is_passed_by(self, values: list[Any]) -> bool:
        """Return whether the asserts hold with these values."""
        names = {**FUNCTIONS, "math": math, "__builtins__": {}, **{f"_{i}": value for i, value in enumerate(values)}}
        try:
            tests = (eval(compile(ast.Expression(test), "test", "eval"), names) for test in self.tests)
            return len(values) == self.num_values and all(tests)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
            return False


def take_apart(code: str) -> TakenApart | None:
    """Return the asserts at the top of code, or of a function `check(candidate)` that its last line calls, taken apart.
    None: one of them can't be, or there is none.
    """
    tree = ast.parse(code)
    check, bound = _function_of_the_last_line(tree), set(_bound_names(tree))
    taking = _Taking(check.args.args[0].arg if check else "", bound)
    try:
        for block in (tree.body, *([check.body] if check else [])):
            block[:] = [kept for each in block for kept in taking.replaced(each)] or [ast.Pass()]
    except ValueError:
        return None
    if not taking.num_values or "*" in bound or any(isinstance(each, ast.Assert) for each in ast.walk(tree)):
        return None
    return TakenApart(ast.unparse(ast.fix_missing_locations(tree)), tuple(taking.tests), taking.num_values)


def _function_of_the_last_line(tree: ast.Module) -> ast.FunctionDef | None:
    """Return the function of one argument that the last line calls, and nothing else does."""
    match tree.body[-1:]:
        case [ast.Expr(ast.Call(ast.Name(name), [_], []))]:
            functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
            inside = [node for each in functions for node in ast.walk(each)]
            uses = sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(tree))
            if len(functions) == uses == 1 == len(functions[0].args.args) and not functions[0].decorator_list:
                return None if any(isinstance(each, ast.Return | ast.Yield) for each in inside) else functions[0]
    return None


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a test gives a meaning, but for math and isclose with their usual one."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                module = getattr(node, "module", "math")
                yield from (each.asname or each.name for each in aliases if each.asname or module != "math")


class _Taking(ast.NodeTransformer):
    def __init__(self, candidate: str, bound: set[str]) -> None:
        self._candidate, self._bound = candidate, bound  # without a candidate any unknown function is the answer's
        self._values: list[ast.expr] = []
        self.tests: list[ast.expr] = []
        self.num_values = 0

    def replaced(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return what runs beside the answer in the place of a statement."""
        self._values = []
        if not isinstance(statement, ast.Assert):
            return [statement]
        self.tests.append(ast.fix_missing_locations(self._test(statement.test)))
        return [ast.Expr(ast.Call(ast.Name(KEEP, ast.Load()), [each], [])) for each in self._values]

    def _test(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.BoolOp(operator, tests):
                return ast.BoolOp(operator, [self._test(each) for each in tests])
            case ast.UnaryOp(ast.Not(), inner):
                return ast.UnaryOp(ast.Not(), self._test(inner))
        before = len(self._values)
        part: ast.expr = self.visit(node)
        if len(self._values) > before + 1:
            raise ValueError("two values of the answer's are compared")
        if isinstance(part, ast.Name):  # only its truth counts, which any object has
            self._values[-1] = ast.parse(f"_builtins.bool({ast.unparse(node)})", mode="eval").body
        return part

    def visit(self, node: ast.AST) -> Any:
        """Return a part of a test with a name in the place of the answer's call."""
        match node:
            case ast.Call() if self._is_answers(node):
                if sum(map(self._is_answers, ast.walk(node))) > 1:
                    raise ValueError("the outer call may be a comparison")
                self._values.append(node)
                self.num_values += 1
                return ast.Name(f"_{self.num_values - 1}", ast.Load())
            case ast.Call(ast.Name(name) | ast.Attribute(ast.Name("math"), "isclose" as name)) if (
                name in FUNCTIONS and not {name, "math"} & self._bound
            ):
                node.args, node.keywords = list(map(self.visit, node.args)), list(map(self.visit, node.keywords))
                return node
            case ast.BinOp(_, operator) if not isinstance(operator, ast.Add | ast.Sub | ast.Div):
                if any(isinstance(each, ast.Name) for each in ast.walk(node)):
                    raise ValueError("a value may make this large")
        if not isinstance(node, _PLAIN):
            raise ValueError(f"{type(node).__name__} is evaluated nowhere")
        return self.generic_visit(node)

    def _is_answers(self, node: ast.AST) -> bool:
        """Return whether a node is a call of a function, or of the method of a new object, that is the answer's."""
        match node:
            case ast.Call(ast.Name(name)):
                is_known = name in self._bound or name in FUNCTIONS or hasattr(builtins, name) or name[:1].isupper()
                return name == self._candidate if self._candidate else not is_known
            case ast.Call(ast.Attribute(ast.Call(ast.Name(owner)), name)):
                return owner[:1].isupper() and not name.startswith("__") and not self._candidate
        return False
