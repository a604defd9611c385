"""Asserts that are taken apart into what runs beside the answer and what is evaluated outside."""

from __future__ import annotations

import ast
import builtins
import math
import time
from collections import Counter

import pytest

from rollout_server.rewards.code.asserts import IMPORTS, take_apart
from rollout_server.rewards.code.plain import MOST_STEPS, Items, can_evaluate, evaluate

_CHECK = "def check(candidate):\n    {}\ncheck(f)"


@pytest.mark.parametrize(
    ("code", "beside", "outside"),
    [
        ("assert f(3) == 7, f'got {f(3)}'", "_keep_result(f(3))", ["_0 == 7"]),
        ("assert f(3)", "_keep_result(_builtins.bool(f(3)))", ["_0"]),
        ("assert set(f((3, 4))) == set((4, 3))", "_keep_result(f((3, 4)))", ["set(_0) == set((4, 3))"]),
        ("assert f(3).keys() == {1}", "_keep_result(f(3))", ["_0.keys() == {1}"]),
        ("assert reverse(Node(1)).next.val == 2", "_keep_result(reverse(Node(1)).next.val)", ["_0 == 2"]),
        ("assert str(f(3)) == 'x'", "_keep_result(_builtins.str(f(3)))", ["_0 == 'x'"]),
        ("assert decode(encode('a')) == 'a'", "_keep_result(decode(encode('a')))", ["_0 == 'a'"]),
        ("assert Solution().f(3) == 7", "_keep_result(Solution().f(3))", ["_0 == 7"]),
        ("x = [3, 1]\nf(x)\nassert x == [1, 3]", "x = [3, 1]\nf(x)\n_keep_result(x)", ["_0 == [1, 3]"]),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1\nassert s.size == 0",
         "s = Stack()\ns.push(1)\n_keep_result(s.pop())\n_keep_result(s.size)", ["_0 == 1", "_1 == 0"]),
        ("assert f(1)[0] == 3 and not f(2)", "_keep_result(f(1))\n_keep_result(_builtins.bool(f(2)))",
         ["_0[0] == 3 and (not _1)"]),
        ("assert sum(10, 15) == 6", "_keep_result(sum(10, 15))", ["_0 == 6"]),
        ("assert next(5, 3) == 7", "_keep_result(next(5, 3))", ["_0 == 7"]),
        ("assert gcd(8, 12) == 4", "_keep_result(gcd(8, 12))", ["_0 == 4"]),
        ("arr = [1, 2]\nassert sum(arr) == 3", "arr = [1, 2]\n_keep_result(sum(arr))", ["_0 == 3"]),
        (_CHECK.format("assert candidate(Node(3)) == 7; assert True"),
         "def check(candidate):\n    _keep_result(candidate(Node(3)))\ncheck(f)", ["_0 == 7", "True"]),
        (_CHECK.format("assert candidate(tree([3])) == True"),
         "def check(candidate):\n    _keep_result(candidate(tree([3])))\ncheck(f)", ["_0 == True"]),
    ],
)  # fmt: skip
def test_calls_of_the_answer_run_beside_it_and_the_rest_outside(code: str, beside: str, outside: list[str]) -> None:
    taken = take_apart(code)
    assert taken is not None
    assert (taken.code, [ast.unparse(each) for each in taken.tests]) == (beside, outside)


@pytest.mark.parametrize("code", [
    "check(f)", "", "f(1)", "assert True", "assert 1 == 1",
    "assert f(1) == f(2)",  # no side of it is known outside
    "expected = 7\nassert f(3) == expected", "x = [3, 1]\nassert f(x) == sorted(x)",
    "assert f(3).__eq__(7)", "assert [7].__eq__(f(3))", "assert f(3).equals(7)",
    "ok = f(3) == 7\nassert ok == True", "assert is_same(f(3), [1, 2])", "assert is_same(f(3), [1, 2]) == True",
    "assert cmp(f(3), 7) == 0", "same = is_same(f(3), 7)\nassert same == True", "r = f(3)\nassert is_same(r, 7)",
    "a, b = f(3)\nassert is_same(a, 7)", "r = [f(3)]\ns = r[0]\nassert is_same(s, 7)",
    "for r in f(3): pass\nassert is_same(r, 7)",
    "def same(a, b): return a == b\nassert same(f(3), 7)", "same = lambda a, b: a == b\nassert same(f(3), 7)",
    "from operator import eq\nassert eq(f(3), 7)", "import numpy as np\nassert np.allclose(f(3), [1.0])",
    "import numpy as math\nassert math.isclose(f(3), 1.0)", "from numpy import isclose\nassert isclose(f(3), 1.0)",
    "def isclose(a, b): return abs(a - b) < 1\nassert isclose(f(3), 1.0)", "from numpy import *\nassert f(3) == 7",
    "assert all(f(x) == y for x, y in [(1, 2)])", "for x in [1]: assert f(x) == 3",
    "if f(1): assert f(2) == 3", "assert (y := f(3)) == 7", "assert sorted(f(3), key=lambda x: -x) == [2, 1]",
    "assert f'{f(3)}' == '7'", "assert f(*[3]).x == {**{}}", "assert f(3) == datetime.date(2020, 1, 1)",
    _CHECK.format("if candidate(3): return\n    assert candidate(3) == 7"),
    _CHECK.format("assert same(candidate(3), 7)"), _CHECK.format("assert candidate(3) == 7") + "\ncheck(f)",
    "def check(candidate, other=1):\n    assert candidate(3) == 7\ncheck(f)",
    "@twice\n" + _CHECK.format("assert candidate(3) == 7"),
])  # fmt: skip
def test_what_may_hide_a_comparison_or_is_not_known_is_not_taken_apart(code: str) -> None:
    assert take_apart(code) is None


VALUES = {"_0": [3, 1, 2], "_1": {"a": 1}, "_2": 0.1 + 0.2, "_3": Items((1, 2)), "_4": "a,b"}


@pytest.mark.parametrize("text", [
    "sorted(_0) == [1, 2, 3]", "sorted(_0, reverse=True) == [3, 2, 1]", "max(_0, key=abs) == 3", "_0[1:] == [1, 2]",
    "_0[-1] == 2", "sum(_0) == 6", "len(_0) == 3", "set(_0) == {1, 2, 3}", "tuple(_0) == (3, 1, 2)", "3 in _0",
    "9 not in _0", "all(x > 0 for x in _0)", "any([x == 2 for x in _0 if x > 1])", "{x % 2 for x in _0} == {0, 1}",
    "[a + b for a in _0 for b in (1, 2)] == [4, 5, 2, 3, 3, 4]", "all(i < 3 and x > 0 for i, x in enumerate(_0))",
    "_1 == {'a': 1}", "_1.keys() == {'a'}", "list(_1.items()) == [('a', 1)]", "_1.get('b') is None",
    "_1['a'] is not True", "round(_2, 2) == 0.3", "abs(_2 - 0.3) < 1e-9", "math.isclose(_2, 0.3, rel_tol=1e-9)",
    "isclose(_2, 0.3)", "0 < _2 < 1", "-_2 < 0", "_2 * 10 > 2", "_2 ** 2 < 1", "7 // 2 == 3 and 7 % 2 == 1",
    "not _2 == 1", "_2 < 0 or True", "isinstance(_2, (int, float))", "type(_2) == float", "_2 < math.pi < math.inf",
    "list(_3) == [1, 2]", "len(_3) == 2", "set(_3) | {3} == {1, 2, 3}", "_4.split(',') == ['a', 'b']",
    "'-'.join(_4.split(',')) == 'a-b'", "_4.startswith('a')", "len({'a'} ^ set(_4)) == 2", "[0] * 3 == [0, 0, 0]",
    "list(range(3)) == [0, 1, 2]", "Counter(_4) == {'a': 1, ',': 1, 'b': 1}", "dict([(1, 2)]) == {1: 2}",
])  # fmt: skip
def test_an_expression_has_the_value_that_python_gives_it(text: str) -> None:
    expression = ast.parse(text, mode="eval").body
    assert can_evaluate(expression, VALUES) and evaluate(expression, VALUES) is True
    assert eval(text, {"math": math, "isclose": math.isclose, "Counter": Counter, **VALUES}) is True


@pytest.mark.parametrize("text", [
    "_3 == [1, 2]", "_3 == (1, 2)", "all(a == b for a, b in zip(_0, [3, 1]))", "_1['a'] is True", "_0 is None",
    "all(a == b for a, b in zip(_0, [3, 1, 2, 4]))",
])  # fmt: skip
def test_an_expression_that_does_not_hold_is_false_or_fails(text: str) -> None:
    expression = ast.parse(text, mode="eval").body
    assert can_evaluate(expression, VALUES)
    try:
        assert evaluate(expression, VALUES) is False
    except ValueError as error:
        assert "zip" in str(error)


@pytest.mark.parametrize("text", [
    "open('x')", "__import__('os')", "_0.__class__", "_0.append(1)", "eval('1')", "print(_0)", "other", "''.format(_0)",
    "(lambda: 1)()", "[].copy.__self__", "math.factorial(9)", "math", "f'{_0}'", "{**_1, 'b': 2}", "max(*_0)",
    "max(**_1)", "(yield)", "(x := 1)", "1 if _0 else 2", "_0 << 3",
    "getattr(_0, 'x')", "{k: 1 for k in _0}", "~1", "_0 @ _0",
])  # fmt: skip
def test_nothing_else_is_evaluated(text: str) -> None:
    expression = ast.parse(text, mode="eval").body
    assert not can_evaluate(expression, VALUES)
    with pytest.raises((TypeError, KeyError, AssertionError)):
        evaluate(expression, VALUES)


ONE_HASH = [number * (2**61 - 1) for number in range(20_000)]
MUCH_WORK = {
    "a sequence as long as a value says": ("[0] * _0 == [0]", 10**12),
    "a text as long as a value says": ("'ab' * _0 == 'ab'", 10**12),
    "a power": ("2 ** _0 == 8", 10**9),
    "a range": ("list(range(_0)) == [0]", 10**12),
    "digits": ("round(12345, _0) == 12300", -(10**9)),
    "many turns": ("all(x > 0 for x in _0)", [1] * MOST_STEPS),
    "turns within turns": ("all(x > 0 for y in _0 for x in [1, 2, 3, 4, 5, 6, 7, 8])", [1] * (MOST_STEPS // 8)),
    "a set of one hash": ("set(_0) == {1}", ONE_HASH),
    "keys of one hash": ("dict(_0) == {1: 2}", [(each, 1) for each in ONE_HASH]),
    "counts of one hash": ("Counter(_0) == {1: 2}", ONE_HASH),
    "a sum of lists": ("sum(_0, []) == [1]", [[1]] * 100_000),
    "a format": ("_0 % 1 == ''", "%1000000000d"),
    "keys and a list": ("{1: 2}.keys() ^ _0 == {1}", ONE_HASH),
}


@pytest.mark.parametrize("name", MUCH_WORK)
def test_a_hostile_value_costs_little_work(name: str) -> None:
    text, value = MUCH_WORK[name]
    expression = ast.parse(text, mode="eval").body
    assert can_evaluate(expression, ["_0"])
    began_s = time.process_time()
    with pytest.raises((ValueError, TypeError)):
        evaluate(expression, {"_0": value})
    assert time.process_time() - began_s < 10  # it would be minutes, or all memory


def test_the_imports_before_an_answer_hide_no_builtin() -> None:
    names: dict[str, object] = {}
    exec(IMPORTS, names)
    assert {name for name in dir(builtins) if names.get(name, getattr(builtins, name)) is not getattr(builtins, name)} \
        <= {"__doc__", "__loader__", "__name__", "__package__", "__spec__"}
    assert eval("(pow(2, 10, 7), str(pow(2, 10)))", names) == (2, "1024")
