"""The tests of a question, in one of verl's schemas, as programs to run and outcomes to expect.

    {inputs: [text, ...], outputs: [text, ...]}                   a program: its output for each input
    {fn_name: name, inputs: [lines of JSON, ...], outputs: [JSON, ...]}   a function, or the method of `Solution`
    {assert_case: [code, ...]}                                    asserts, each appended to the answer

The program of a case never contains what is expected. Its result comes out as text, or as values in JSON, and is
compared outside. An assert is taken apart:

    assert abs(f(3) - 0.5) < 1e-6        f(3) runs in the answer's process, its value comes out as JSON;
                                         abs(_0 - 0.5) < 1e-6 is evaluated outside, where nothing of the answer is

Each part that `and`, `or` and `not` join must have one call of the answer's, and otherwise literals, comparisons,
+, -, / and `FUNCTIONS`. Any other assert runs inside, where a dishonest answer can pass it.

Only plain values come out. An object of the answer's own class is refused, or becomes the plain type that it inherits
from, or the items that it yields. So no method of the answer takes part in a comparison.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,99}")
_SCHEMAS = "{inputs, outputs}, {fn_name, inputs, outputs} or {assert_case}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a program: code after the answer, the input, and the expected output."""

    suffix: str = ""
    """The code after the answer. It prints a line with `marker` and the result."""
    stdin: str = ""
    marker: str = ""
    """The word before the result in the output; empty: all of the output is the result."""
    expected: Any = None
    """The expected output or value; the asserts that were taken apart; None for code that runs inside."""
    kind: str = "output"
    """output, value (of a function), outside (asserts that are evaluated outside) or inside (code with asserts)."""

    @property
    def is_cheatable(self) -> bool:
        """Whether a wrong answer can pass, because the comparison runs in its process."""
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
            coded = json.loads(result)
            if self.kind == "value":
                return _is_expected(without_tuples(decode(coded)), self.expected)
            return isinstance(coded, list) and self.expected.is_passed_by([decode(each) for each in coded])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the cases of a question.

    Raises:
        ValueError: the ground truth has none of the schemas, or no test.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests must be {_SCHEMAS}, got {type(tests).__name__}")
    if asserts := _listed(tests, "assert_case"):
        return [_assert_case(_text(code)) for code in asserts]
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
    """Return what tests have by a key, which is an empty text in a column that a question does not use.

    Raises:
        ValueError: it is one text, so that every letter would be a case.
    """
    listed = tests.get(key)
    if isinstance(listed, str) and listed:
        raise ValueError(f"{key} must be a list with an item for each case, got the text {listed!r:.80}")
    return listed


def first_cheatable(cases: Sequence[Case]) -> str:
    """Return the place of the first cheatable test in the ground truth; "" if there is none."""
    return next((f"assert_case[{number}]" for number, case in enumerate(cases) if case.is_cheatable), "")


def _call_case(name: str, given: Any, output: Any) -> Case:
    """Return the case of a call, whose arguments are lines of JSON, or a list of them."""
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


def _assert_case(code: str) -> Case:
    """Return the case of asserts that are taken apart, or else of code that runs inside."""
    marker = secrets.token_hex(8)
    if taken := take_apart(code):
        keep = f"def {KEEP}(value): _results.append(_encode_result(value))"
        end = f"_builtins.print('\\n{marker} [' + ', '.join(_results) + ']', flush=True)"
        suffix = f"{ENCODE}\n_results = []\n{keep}\n{taken.code}\n{end}"
        return Case(suffix=suffix, marker=marker, expected=taken, kind="outside")
    suffix = f"{code}\nimport builtins as _builtins\n_builtins.print('\\n{marker} passed', flush=True)"
    return Case(suffix=suffix, marker=marker, kind="inside")


def _is_expected(value: Any, expected: Any) -> bool:
    """Return whether a function has returned what is expected; as in verl, [x] stands for x too, and the keys of a
    mapping, which are texts in JSON, for whole numbers.
    """
    meant = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    return any(value == each or value == _with_numbers(each) for each in meant)


def _with_numbers(value: Any) -> Any:
    """Return a value with numbers as keys in each mapping whose keys are all whole numbers in text."""
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    if not isinstance(value, dict):
        return value
    are_numbers = all(isinstance(key, str) and _WHOLE_NUMBER.fullmatch(key) for key in value)
    return {int(key) if are_numbers else key: _with_numbers(each) for key, each in value.items()}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(code: Any) -> str:
    if not isinstance(code, str):
        raise ValueError(f"assert_case must be a list of code, got {code!r:.80}")
    return code


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
    """Return a value with lists instead of tuples, as JSON has only lists."""
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
    """Asserts, and the code that runs in the answer's process for them."""

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
    """Split the asserts of a test into calls of the answer, which run inside, and comparisons, which run outside.

    Asserts at the top of the code count, and those of a function `check(candidate)` that its last line calls. None:
    there are none, or one can't be split.
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
        """Return the statements that run in the answer's process for one statement of a test."""
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
