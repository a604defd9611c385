"""Asserts that are taken apart into what runs beside the answer and what is evaluated outside."""

from __future__ import annotations

import ast
import time
from typing import Any

import pytest

from rollout_server.rewards.code.cases import Items, take_apart
from rollout_server.rewards.code.checker import PROVIDED

_CHECK = "def check(candidate):\n    {}\ncheck(f)"


@pytest.mark.parametrize(
    ("code", "beside", "outside"),
    [
        ("assert f(3) == 7, f'got {f(3)}'", "_keep_result(f(3))", ["_0 == 7"]),
        ("assert f(3)", "_keep_result(_builtins.bool(f(3)))", ["_0"]),
        ("assert 7 == f(3)", "_keep_result(f(3))", ["7 == _0"]),
        ("assert (f(3) == 7) == True", "_keep_result(f(3))", ["(_0 == 7) == True"]),
        ("assert not (f(3) != 7)", "_keep_result(f(3))", ["not _0 != 7"]),
        ("assert round(f(3), 2) == 7", "_keep_result(f(3))", ["round(_0, 2) == 7"]),
        ("assert 6.5 < f(3) < 7.5", "_keep_result(f(3))", ["6.5 < _0 < 7.5"]),
        ("assert set(f((3, 4))) == set((4, 3))", "_keep_result(f((3, 4)))", ["set(_0) == set((4, 3))"]),
        ("assert f(Node(3)) == 7", "_keep_result(f(Node(3)))", ["_0 == 7"]),
        ("assert Solution().f(3) == 7", "_keep_result(Solution().f(3))", ["_0 == 7"]),
        ("assert f(1)[0] == 3 and not f(2)", "_keep_result(f(1))\n_keep_result(_builtins.bool(f(2)))",
         ["_0[0] == 3 and (not _1)"]),
        ("assert gcd(8, 12) == 4", "_keep_result(gcd(8, 12))", ["_0 == 4"]),
        ("import math; assert math.isclose(f(1), 3.0, rel_tol=1e-3)", "import math\n_keep_result(f(1))",
         ["math.isclose(_0, 3.0, rel_tol=0.001)"]),
        ("x = 5\nassert f(x) in (10 ** 9 + 7, [0] * 2)", "x = 5\n_keep_result(f(x))", ["_0 in (10 ** 9 + 7, [0] * 2)"]),
        (_CHECK.format("assert abs(candidate(3) - 7) < 1e-6; assert True"),
         "def check(candidate):\n    _keep_result(candidate(3))\ncheck(f)", ["abs(_0 - 7) < 1e-06", "True"]),
    ],
)  # fmt: skip
def test_calls_of_the_answer_run_beside_it_and_the_rest_outside(code: str, beside: str, outside: list[str]) -> None:
    taken = take_apart(code)
    assert taken is not None
    assert (taken.code, [ast.unparse(each) for each in taken.tests]) == (beside, outside)


@pytest.mark.parametrize("code", [
    "check(f)", "", "f(1)", "assert True", "assert f(1) == f(2)", "expected = 7\nassert f(3) == expected",
    "assert f(3).__eq__(7)", "assert f(3).equals(7)", "assert is_same(f(3), [1, 2])", "assert is_same(x=f(3)) == True",
    "assert cmp(f(3), 7) == 0", "def same(a, b): return a == b\nassert same(f(3), 7)", "assert str(f(3)) == '7'",
    "from operator import eq\nassert eq(f(3), 7)", "import numpy as np\nassert np.allclose(f(3), [1.0])",
    "import numpy as math\nassert math.isclose(f(3), 1.0)", "from numpy import isclose\nassert isclose(f(3), 1.0)",
    "from numpy import *\nassert f(3) == 7", "def abs(x): return 0\nassert abs(f(3) - 7) < 1",
    "assert all(f(x) == y for x, y in [(1, 2)])", "for x in [1]: assert f(x) == 3", "if f(1): assert f(2) == 3",
    "assert (y := f(3)) == 7", "assert f'{f(3)}' == '7'", "assert [0] * f(3) == [0]", "assert 2 ** f(3) == 8",
    "assert f(3) % 1 == ''", "assert sorted([1], key=g(f(3))) == [1]", "assert Point(3) == 3",
    "assert eval(f(3)) == 7", "assert sum(10, 15) == 6", "assert ().__class__ == f(3)",
    _CHECK.format("if candidate(3): return\n    assert candidate(3) == 7"),
    _CHECK.format("assert same(candidate(3), 7)"),
    _CHECK.format("assert candidate(3) == 7") + "\ncheck(f)", "@twice\n" + _CHECK.format("assert candidate(3) == 7"),
])  # fmt: skip
def test_what_may_hide_a_comparison_or_is_not_known_is_not_taken_apart(code: str) -> None:
    assert take_apart(code) is None


def holds(code: str, value: Any) -> bool:
    taken = take_apart(code)
    assert taken is not None
    return taken.is_passed_by([value])


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        ("assert f(1) == [3, 1]", [3, 1], Items((3, 1))), ("assert f(1) == (1, 2)", (1, 2), [1, 2]),
        ("assert sorted(f(1)) == [1, 3]", Items((3, 1)), [1, 2]), ("assert round(f(1), 2) == 0.3", 0.1 + 0.2, 0.4),
        ("assert abs(f(1) - 10 / 4) < 1e-9", 2.5, "x"), ("assert 1 < f(1) <= 3", 3, 1),
        ("assert f(1) is None", None, 0),
        ("assert 'a' in f(1)", ["a"], {"b": 1}), ("assert len(f(1)) - 1 == 2", "abc", 3),
        ("assert f(1)[-1] == 2", [2], []),
        ("assert max(f(1)) == 3 and min(f(2)) == 1", None, None), ("assert set(f(1)) == {1}", [1, 1], [2]),
    ],
)  # fmt: skip
def test_a_test_has_the_result_that_python_gives_it(code: str, right: Any, wrong: Any) -> None:
    if "and" in code:
        taken = take_apart(code)
        assert taken and taken.is_passed_by([[3], [1]]) and not taken.is_passed_by([[3]])
        return
    assert holds(code, right) and not holds(code, wrong)


ONE_HASH = [number * (2**61 - 1) for number in range(20_000)]


@pytest.mark.parametrize(("code", "value"), [
    ("assert set(f(1)) == {1}", ONE_HASH), ("assert round(f(1), 2) == round(12345, 2)", "x"),
    ("assert round(7, f(1)) == 8", -(10**9)), ("assert sum(f(1)) == [1]", [[1]] * 100_000),
])  # fmt: skip
def test_a_hostile_value_costs_little_work(code: str, value: Any) -> None:
    began_s = time.process_time()
    assert not holds(code, value)
    assert time.process_time() - began_s < 5  # it would be minutes, or all memory


def test_the_imports_before_an_answer_hide_no_builtin() -> None:
    names: dict[str, Any] = {}
    exec("\n".join(PROVIDED.values()), names)
    assert "pow" not in PROVIDED and "open" not in PROVIDED
    assert eval("(pow(2, 10, 7), gcd(8, 12), Counter('aa'), math.pi > 3, List[int])", names)[:2] == (2, 4)
