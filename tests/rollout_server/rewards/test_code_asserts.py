"""Asserts that are taken apart into what runs beside the answer and what is evaluated outside."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.rewards.code.cases import take_apart
from rollout_server.rewards.code.checker import PROVIDED

_CHECK = "def check(candidate):\n    {}\ncheck(f)"


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


FORMS = st.sampled_from([
    "assert f(1) == {}, 'a message'", "assert {} != f(1)", "assert not f(1) == {}", "assert (f(1) == {}) == True",
    "assert f(1) in ({}, [0] * 2)", "assert f(1) < {}", "assert -1 < f(1) <= {}", "assert round(f(1), 2) == {}",
    "assert abs(f(1) - {}) < 1e-6", "assert set(f(1)) == set({})", "assert sorted(f(1)) == {}", "assert f(1)[0] == {}",
    "assert len(f(1)) - 1 == {}", "assert f(1)[-1] == {} and not Solution().f(2)", "assert f(1) is None or f(2) == {}",
    "import math; assert math.isclose(f(1), {}, rel_tol=1e-3)", "x = 5\nassert f(x) == {}",
    "def check(candidate):\n    assert candidate(3) == {}; assert True\ncheck(f)",
])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.3, 0.1 + 0.2, 2.5, "", "ab"]),
    lambda inner: st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple), max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(form=FORMS, expected=VALUES, returned=VALUES | st.just("as expected"))
def test_a_test_has_the_result_that_python_gives_it(form: str, expected: Any, returned: Any) -> None:
    returned = expected if returned == "as expected" else returned
    code = form.format(repr(expected))
    taken = take_apart(code)
    assert taken is not None and "assert" not in taken.code
    try:
        exec(code, {"f": lambda _: returned, "Solution": lambda: SimpleNamespace(f=lambda _: returned)})
        holds = True
    except (AssertionError, LookupError, TypeError):
        holds = False
    assert taken.is_passed_by([returned] * taken.num_values) == holds


ONE_HASH = [number * (2**61 - 1) for number in range(20_000)]


@pytest.mark.parametrize(("code", "value"), [
    ("assert set(f(1)) == {1}", ONE_HASH), ("assert round(f(1), 2) == round(12345, 2)", "x"),
    ("assert round(7, f(1)) == 8", -(10**9)), ("assert sum(f(1)) == [1]", [[1]] * 100_000),
])  # fmt: skip
def test_a_hostile_value_costs_little_work(code: str, value: Any) -> None:
    began_s = time.process_time()
    taken = take_apart(code)
    assert taken is not None and not taken.is_passed_by([value])
    assert time.process_time() - began_s < 5  # it would be minutes, or all memory


def test_the_imports_before_an_answer_hide_no_builtin() -> None:
    names: dict[str, Any] = {}
    exec("\n".join(PROVIDED.values()), names)
    assert "pow" not in PROVIDED and "open" not in PROVIDED
    assert eval("(pow(2, 10, 7), gcd(8, 12), Counter('aa'), math.pi > 3, List[int])", names)[:2] == (2, 4)
