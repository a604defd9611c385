"""The reward `code`: right and wrong programs, those that cheat, and those that misbehave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from async_rl.base.config.task_parts import SandboxConfig
from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.code.checker import CodeChecker, CodeSettings, sandbox_of
from rollout_server.rewards.code.sandbox import Bubblewrap
from rollout_server.rewards.contract import RewardResult
from rollout_server.rewards.scoring import open_rewards
from tests.kit.configs import changed
from tests.kit.rewards import of
from tests.kit.sandbox import needs_bubblewrap
from tests.kit.sandbox.cheats import (
    CALLS,
    CHEATS,
    CHEATS_OF_OUTPUT,
    LISTS,
    NUMBERS,
    RIGHT,
    RIGHT_LIST,
)  # fmt: skip

pytestmark = pytest.mark.processes

_HELPER = "def same(a, b): return a == b\nassert same("
INSIDE = {"assert_case": [f"{_HELPER}add(1, 2), 3)", f"{_HELPER}add(3, 4), 7)"]}
LINES = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
TWO_LINES = {"inputs": ["1 2\n"], "outputs": ["3\n999\n"]}


def scored(answers: list[str], tests: Any, kind: Any = "bubblewrap", **settings: Any) -> list[RewardResult]:
    of_code = CodeSettings(**settings)
    checker = CodeChecker(sandbox=sandbox_of(SandboxConfig(kind=kind)), settings=of_code)
    question = Question(messages=(), ground_truth=tests)
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda answer: checker.score(question, answer), answers))


def said(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def scores(programs: list[str], tests: Any, **settings: Any) -> list[float | None]:
    return [result.score for result in scored(list(map(said, programs)), tests, **settings)]


@needs_bubblewrap
@pytest.mark.parametrize("tests", [CALLS, INSIDE], ids=["calls", "asserts inside"])
def test_a_right_function_passes_and_a_wrong_one_does_not(tests: Any) -> None:
    method = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b\n"
    guarded = RIGHT + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"
    wrong, broken = "def add(a, b): return 0", "def add(a, b:"
    programs = [RIGHT, "def add(a, b): return a * b + 1", wrong, broken, guarded, method]
    found = scores(programs, tests)
    assert found == [1, 0, 0, 0, 1, 1 if tests is CALLS else 0]


@needs_bubblewrap
def test_a_right_program_passes_and_one_with_missing_lines_does_not() -> None:
    program = "a, b = map(int, input().split())\nprint(a + b)\n"
    assert scores([program, program + "import sys; sys.exit(1)", "print(3)"], LINES) == [1, 0, 0]
    assert scores([program], TWO_LINES) == [0]
    (result,) = scored(["no code here"], LINES)
    assert result.score == 0 and result.metrics["no_code"] == 1


@needs_bubblewrap
@pytest.mark.parametrize(("right", "wrong", "tests"), [
    *((RIGHT, RIGHT_LIST, each) for each in NUMBERS.values()), *((RIGHT_LIST, RIGHT, each) for each in LISTS.values()),
], ids=[*NUMBERS, *(f"list, {name}" for name in LISTS)])
def test_no_cheat_gets_a_mark(right: str, wrong: str, tests: dict[str, Any]) -> None:
    programs = {"right": right, **CHEATS, "wrong": wrong}
    found = scored(list(map(said, programs.values())), tests, partial=True, timeout_s=1.0)
    assert {name for name, each in zip(programs, found, strict=True) if each.score} == {"right"}
    assert found[0].score == 1 and {each.metrics["cheatable"] for each in found} == {0}


@needs_bubblewrap
def test_no_cheat_gets_a_mark_for_what_it_prints() -> None:
    found = scores(list(CHEATS_OF_OUTPUT.values()), LINES, partial=True)
    assert dict(zip(CHEATS_OF_OUTPUT, found, strict=True)) == dict.fromkeys(CHEATS_OF_OUTPUT, 0)


@needs_bubblewrap
def test_a_check_that_runs_inside_is_counted_as_cheatable_and_not_by_the_exit_code() -> None:
    programs = [RIGHT, *(CHEATS[name] for name in ("_exit 0", "sys.exit at import", "always equal"))]
    found = scored(list(map(said, programs)), INSIDE)
    assert [each.score for each in found] == [1, 0, 0, 1]  # the last is why such tests are named before a run starts
    assert [each.metrics["cheatable"] for each in found] == [1] * 4


@needs_bubblewrap
@pytest.mark.parametrize(
    "tests",
    [CALLS, INSIDE, {"assert_case": [
        "assert add(1, 2)", "assert not add(1, -1)", "assert abs(add(1, 2) - 3) < 1e-9", "assert list(each(3)) == [3]",
    ]}],
    ids=["calls", "asserts inside", "asserts of one value"],
)
def test_an_answer_may_give_the_names_of_builtins_to_things_of_its_own(tests: Any) -> None:
    names = (
        "abs", "bool", "bytes", "dict", "globals", "hasattr", "int", "isinstance", "list", "next", "print", "repr",
        "set", "str", "type",
    )  # fmt: skip
    mine = "".join(f"{name} = 'mine'\n" for name in (*names, "json", "__import__")) + "def each(x): yield x\n"
    assert scores([RIGHT + mine], tests) == [1]


@needs_bubblewrap
def test_partial_reward_is_the_share_of_the_first_tests() -> None:
    tests = {"fn_name": "add", "inputs": ["1\n2"] * 3 + ["2\n2"] * 9, "outputs": ["3"] * 3 + ["5"] * 9}
    assert scores([RIGHT], tests, partial=True) == [0.3]
    assert scores([RIGHT], tests, partial=True, max_cases=4) == [0.75]
    assert scores([RIGHT], tests) == [0]


@needs_bubblewrap
def test_programs_that_hang_or_grow_cost_their_answers_alone() -> None:
    loop, grow = "while True: pass", "x = []\nwhile True: x.append(bytearray(1 << 24))"
    found = scored([said(each) for each in (loop, RIGHT, grow, RIGHT)], CALLS, timeout_s=1.0)
    assert [each.score for each in found] == [0, 1, 0, 1]
    assert [found[number].metrics["late"] for number in (0, 1, 3)] == [1, 0, 0]
    assert not found[0].is_final and found[1].is_final


class Broken(Bubblewrap):
    """A sandbox that can't start."""

    def command_line(self, user: int | None) -> list[str]:
        return ["sh", "-c", "echo it is broken >&2; exit 1"]


def test_a_sandbox_that_does_not_start_gives_no_verdict() -> None:
    checking = CodeChecker(sandbox=Broken(), settings=CodeSettings())
    result = checking.score(Question(messages=(), ground_truth=CALLS), said(RIGHT))
    assert result.score is None and "it is broken" in result.reason


def test_without_a_sandbox_programs_run_as_this_user() -> None:
    programs = [RIGHT, "while True: pass", CHEATS["always equal"]]
    assert scores(programs, CALLS, kind="none", timeout_s=2.0) == [1, 0, 0]


def test_a_run_whose_programs_can_not_be_contained_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config = of({"reward": "code"})
    with pytest.raises(ConfigError, match=r"task\.sandbox\.kind: none"):
        open_rewards(config, None)  # type: ignore[arg-type]
    open_rewards(changed(config, task={"sandbox": {"kind": "none"}}), None)  # type: ignore[arg-type]
