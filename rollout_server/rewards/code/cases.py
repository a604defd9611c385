"""Turns the tests of a question, in one of verl's schemas, into programs to run and results to expect.

    {inputs: [text, ...], outputs: [text, ...]}                   a program: its output for each input
    {fn_name: name, inputs: [lines of JSON, ...], outputs: [JSON, ...]}   a function, or the method of `Solution`
    {assert_case: [code, ...]}                                    asserts, each appended to the answer

The program of a case never contains the expected result. Its own result is printed as text, or as values in JSON, and
is compared outside the sandbox. An assert is split into two parts:

    assert abs(f(3) - 0.5) < 1e-6        f(3) runs in the answer's process, its value is printed as JSON;
                                         abs(_0 - 0.5) < 1e-6 is evaluated outside, without any code of the answer

Each part that `and`, `or` and `not` join must have exactly one call of the answer's code, and otherwise only literals,
comparisons, +, -, / and `FUNCTIONS`. Any other assert runs inside, where a dishonest answer can pass it.

Only plain values leave the sandbox. An object of a class of the answer is refused, or becomes the plain type that it
inherits from, or the items that it yields. So no method of the answer takes part in a comparison.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SCHEMAS = "{inputs, outputs}, {fn_name, inputs, outputs} or {assert_case}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a program: code to append to the answer, the input, and the expected result."""

    suffix: str = ""
    """The code appended to the answer. It prints a line with `marker` and the result."""
    stdin: str = ""
    marker: str = ""
    """The word before the result in the output. Empty: the whole output is the result."""
    expected: Any = None
    """The expected output or value. For split asserts: the TakenApart. None for asserts that run inside."""
    kind: str = "output"
    """output, value (of a function), outside (asserts evaluated outside the sandbox) or inside (asserts run in it)."""

    @property
    def is_cheatable(self) -> bool:
        """Whether a wrong answer can pass the test, because the comparison runs in the answer's process."""
        return self.kind == "inside"

    def is_passed_by(self, output: str) -> bool:
        """Return whether the program's output shows the expected result."""
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
                value = as_json(decode(coded))
                return self.expected in (value, [value])  # [x] for x, as in verl
            return isinstance(coded, list) and self.expected.is_passed_by([decode(each) for each in coded])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the tests of a question.

    Args:
        ground_truth: a mapping with one of the sets of keys in `_SCHEMAS`, or its JSON.

    Raises:
        ValueError: the ground truth has other keys, or no test.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests must be {_SCHEMAS}, got {type(tests).__name__}")
    if asserts := _listed(tests, "assert_case"):
        return list(map(_assert_case, asserts))
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
    """Return tests[key], a list with one item per case. It is "" or None if the question does not use this column.

    Raises:
        ValueError: the value is a text that is not empty. As a list, each of its letters would be a case.
    """
    listed = tests.get(key)
    if isinstance(listed, str) and listed:
        raise ValueError(f"{key} must be a list with an item for each case, got the text {listed!r:.80}")
    return listed


def first_cheatable(cases: Sequence[Case]) -> str:
    """Return the position of the first cheatable test, such as `assert_case[2]`; "" if there is none."""
    return next((f"assert_case[{number}]" for number, case in enumerate(cases) if case.is_cheatable), "")


def _call_case(name: str, given: Any, output: Any) -> Case:
    """Return the test that calls function `name`.

    Args:
        given: the arguments: lines of JSON, or a list.
        output: the expected value, as JSON.
    """
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


def _assert_case(code: Any) -> Case:
    """Return the test case for code with asserts.

    An assert such as `f(2) == 4` is taken apart: the program computes f(2), and this process compares. If an assert
    can't be taken apart, the program evaluates all of them.
    """
    if not isinstance(code, str):
        raise ValueError(f"assert_case must be a list of code, got {code!r:.80}")
    marker = secrets.token_hex(8)
    if taken := take_apart(code):
        keep = f"def {KEEP}(value): _results.append(_encode_result(value))"
        end = f"_builtins.print('\\n{marker} [' + ', '.join(_results) + ']', flush=True)"
        suffix = f"{ENCODE}\n_results = []\n{keep}\n{taken.code}\n{end}"
        return Case(suffix=suffix, marker=marker, expected=taken, kind="outside")
    suffix = f"{code}\nimport builtins as _builtins\n_builtins.print('\\n{marker} passed', flush=True)"
    return Case(suffix=suffix, marker=marker, kind="inside")


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


ENCODE = '''
import builtins as _builtins
def _encode_result(v):
    from builtins import TypeError, bytearray, bytes, dict, float, frozenset, hasattr, int, isinstance, list
    from builtins import set, str, tuple, type
    def join(items): return "[" + ",".join(list(items)) + "]"
    if v is None: return "null"
    if v is True: return "true"
    if v is False: return "false"
    if isinstance(v, str): return '["str","' + str.encode(v, "utf-8", "surrogatepass").hex() + '"]'
    if isinstance(v, int): return int.__repr__(v)
    if isinstance(v, float): return '["float","' + float.__repr__(v) + '"]'
    if isinstance(v, (bytes, bytearray)): return '["bytes","' + bytes.hex(bytes(v)) + '"]'
    for kind in (list, tuple, set, frozenset):
        if isinstance(v, kind):
            return '["' + kind.__name__ + '",' + join(_encode_result(x) for x in kind.__iter__(v)) + "]"
    if isinstance(v, dict):
        return '["dict",' + join(join((_encode_result(k), _encode_result(x))) for k, x in dict.items(v)) + "]"
    if hasattr(v, "tolist"): return _encode_result(v.tolist())
    if hasattr(v, "__iter__"): return '["tuple",' + join(_encode_result(x) for x in v) + "]"
    raise TypeError("the result is of the type " + type(v).__name__)
'''
"""The code of a function that returns a value as JSON, with tags for the types that JSON does not have. Its imports are
fast. It does not rely on the names of builtins, because the answer that runs before it may have redefined them."""
MOST_COLLISIONS = 100
"""The most members of a set or dictionary with the same hash. Building it takes time quadratic in their number."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""The tolerances for printed numbers with a fraction, as in verl's checker."""


def decode(coded: Any) -> Any:
    """Return the value that `_encode_result` encoded.

    Args:
        coded: its output, parsed as JSON.

    Raises:
        ValueError, TypeError: `coded` is not an output of `_encode_result`.
    """
    if not isinstance(coded, list):
        return coded
    tag, content = coded
    match tag:
        case "str" | "bytes":
            data = bytes.fromhex(content)
            return data if tag == "bytes" else data.decode("utf-8", "surrogatepass")
        case "float":
            return float(content)
        case "list" | "tuple":
            return {"list": list, "tuple": tuple}[tag](decode(each) for each in content)
        case "set" | "frozenset":
            return members(decode(each) for each in content)
        case "dict":
            pairs = [(decode(key), decode(value)) for key, value in content]
            members(key for key, _ in pairs)
            return dict(pairs)
    raise ValueError(f"unknown type {tag!r}")


def members(items: Iterable[Any] = ()) -> set[Any]:
    """Return the items as a set. Raises ValueError if more than MOST_COLLISIONS have the same hash."""
    by_hash: dict[int, list[Any]] = {}
    for each in items:
        same = by_hash.setdefault(hash(each), [])
        if each not in same:
            same.append(each)
            if len(same) > MOST_COLLISIONS:
                raise ValueError("too many values have the same hash")
    return {each for same in by_hash.values() for each in same}


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: with lists for tuples, and with text for whole numbers as keys."""
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {str(key) if type(key) is int else key: as_json(each) for key, each in value.items()}
    return value


def is_equal_output(output: str, expected: str) -> bool:
    """Return whether two outputs have the same words in the same lines. White space at the ends is ignored.

    A number with a fraction may differ by a relative 1e-5.
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


KEEP = "_keep_result"
"""The function that the code of `take_apart` calls with each value computed by the answer."""
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
    """Asserts that are split: code that runs in the answer's process, and comparisons that are evaluated outside."""

    code: str
    """The code for the answer's process. It has `KEEP(call)` for each call of the answer in an assert, and no assert.
    """
    tests: tuple[ast.expr, ...]
    """The asserted expressions, with the names _0, _1, ... instead of the calls, in the order of `code`."""
    num_values: int

    def is_passed_by(self, values: list[Any]) -> bool:
        """Return whether all asserts hold with these values of the answer's calls."""
        names = {**FUNCTIONS, "math": math, "__builtins__": {}, **{f"_{i}": value for i, value in enumerate(values)}}
        try:
            tests = (eval(compile(ast.Expression(test), "test", "eval"), names) for test in self.tests)
            return len(values) == self.num_values and all(tests)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
            return False


def take_apart(code: str) -> TakenApart | None:
    """Split the asserts of a test: calls of the answer run inside, comparisons are evaluated outside.

    It handles asserts at the top level, and in a function `check(candidate)` that the last line calls. None:
    there are no asserts, or one can't be split.
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
    """Return the one-argument function that the last line calls; None unless this is the only use of its name."""
    match tree.body[-1:]:
        case [ast.Expr(ast.Call(ast.Name(name), [_], []))]:
            functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
            inside = [node for each in functions for node in ast.walk(each)]
            uses = sum(isinstance(each, ast.Name) and each.id == name for each in ast.walk(tree))
            if len(functions) == uses == 1 == len(functions[0].args.args) and not functions[0].decorator_list:
                return None if any(isinstance(each, ast.Return | ast.Yield) for each in inside) else functions[0]
    return None


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a test defines or imports. Left out are math and isclose with their usual meaning."""
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
        """Return what runs in the answer's process instead of one statement of a test: its calls, if it is an assert.
        """
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
        """Return a part of an assert, with each call of the answer replaced by a name."""
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
        """Return whether a node calls a function of the answer, or a method of a new object of the answer's class."""
        match node:
            case ast.Call(ast.Name(name)):
                is_known = name in self._bound or name in FUNCTIONS or hasattr(builtins, name) or name[:1].isupper()
                return name == self._candidate if self._candidate else not is_known
            case ast.Call(ast.Attribute(ast.Call(ast.Name(owner)), name)):
                return owner[:1].isupper() and not name.startswith("__") and not self._candidate
        return False
