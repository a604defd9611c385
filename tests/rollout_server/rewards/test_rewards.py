from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import TaskConfig
from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.rules import gsm8k, math_verify, rule_for_source
from rollout_server.rewards.scoring import open_rewards
from tests.kit.configs import changed, make_config

CONFIG = make_config(task=TaskConfig(path="x.parquet"))


class Verifies:
    """A task of which only `verify` counts."""

    def verify(self, question: Question, response: str) -> float:
        return 0.5


def opened(name: str) -> Callable[[Question, str], float]:
    """The function of the reward that task.reward names."""
    (found,) = open_rewards(changed(CONFIG, task={"reward": name}), Verifies())
    return found.reward.function


def about(answer: Any) -> Question:
    return Question(messages=({"role": "user", "content": "How many?"},), ground_truth=answer, extra={"unit": "kg"})


@pytest.mark.parametrize(("response", "answer", "strict", "flexible"), [
    # As in verl the marked number is compared as text, follows `####` and one space, and the last one counts.
    ("48 / 2 = 24\n48 + 24 = 72\n#### 72", "72", 1, 1), ("#### 72", "72", 1, 1), ("####72", "72", 0, 1),
    ("####  72", "72", 0, 1), ("#### 72.", "72", 0, 1), ("#### 72.0", "72", 0, 1), ("#### 72.00", "72", 0, 1),
    ("#### 072", "72", 0, 1), ("#### ,72", "72", 1, 1), ("#### 72,", "72", 1, 1), ("#### 7\nno, #### 72", "72", 1, 1),
    ("#### 72\nno, #### 7", "72", 0, 0), ("The answer is 72.", "72", 0, 1),
    ("The answer is 72. I am 90 % sure", "72", 0, 0), ("#### seventy-two", "72", 0, 0),
    ("#### 72 apples and 3 pears", "72", 1, 0), ("#### $72", "72", 0, 1), ("#### -72", "72", 0, 0), ("", "72", 0, 0),
    # thousands separators are ignored, in the response and (unlike verl) in the answer
    ("#### 1,234,567", "1234567", 1, 1), ("#### 1234567", "1,234,567", 1, 1), ("#### -3", "-3", 1, 1),
    ("#### .5", ".5", 1, 1), ("#### .5", "0.5", 0, 1), ("#### 3.50", "3.5", 0, 1), ("#### 3.5", "3", 0, 0),
    # only the last 300 characters count
    ("#### 72" + "x" * 293, "72", 1, 1), ("#### 72" + "x" * 294, "72", 0, 1),
    # numbers of a column of pandas
    ("#### 72", 72, 1, 1), ("#### 72", 72.0, 1, 1), ("#### 0.5", 0.5, 1, 1), ("#### 72", " 72\n", 1, 1),
])  # fmt: skip
def test_gsm8k_rule(response: str, answer: object, strict: int, flexible: int) -> None:
    assert gsm8k(about(answer), response) == strict
    assert gsm8k(about(answer), response, flexible=True) == flexible


@pytest.mark.processes
@pytest.mark.parametrize(("response", "right", "wrong"), [
    ("so it is $\\boxed{0.5}$", "\\frac12", "2"), ("#### 42", "42", "43"), ("$\\boxed{\\{1, 2\\}}$", "\\{2, 1\\}", "1"),
    ("I do not know", "", "42"), ("$\\boxed{", "", "42"),
    # what follows the thoughts
    ("<think>It may be \\boxed{24}. No.</think>\nThe answer is 72.", "72", "24"),
    ("<think>It is 24</think><answer>\n72 clips</answer> I hope", "72", "24"),
    ("<answer>24</answer> is wrong: <answer>\\boxed{72}</answer>", "72", "24"),
    ("\\boxed{72} in <answer> tags, as step 2 says.", "72", "2"),
    ("It is \\boxed{12}? <answer>None of the above</answer>", "", "12"),
    ("\\boxed{24} is wrong: <answer>72</answer>, written in <answer> tags.", "72", "24"),
    ("<think>It is \\boxed{24}.</think>\n", "24", "72"),
    ("<think>It is \\boxed{24}.</think>\nI do not know.", "", "24"),
    # the last box, where words stand before it
    ("So it is \\boxed{41}. Wait, I forgot one, so it is \\boxed{42}.", "42", "41"),
    ("$x=\\boxed{41} \\text{ or } \\boxed{42}$", "41, 42", "42"),
    ("The one is \\boxed{41}, the other is \\boxed{42}.", "41, 42", "41"),
    ("It is \\boxed{\\boxed{42}}, I am sure.", "42", "41"),
    ("\\boxed{0}, no, \\boxed{42}. The final answer is $41$. I hope it is.", "42", "41"),
    ("$\\boxed{42}$ hmm, no, it is \\boxed{ 41", "42", "41"),  # cut off
])  # fmt: skip
def test_math_verify_compares_the_last_answer_that_is_given(response: str, right: str, wrong: str) -> None:
    assert not right or math_verify(about(right), response) == 1
    assert math_verify(about(wrong), response) == 0


@pytest.mark.processes
def test_math_verify_works_from_several_threads_at_once() -> None:
    def check(n: int) -> tuple[float, float]:
        response = f"$\\boxed{{{n}}}$"
        return math_verify(about(str(n)), response), math_verify(about(str(n + 1)), response)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(check, range(8))) == [(1, 0)] * 8


@pytest.mark.processes
def test_an_answer_that_takes_hours_to_compare_is_wrong_and_the_next_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.rewards.rules.CHECK_TIMEOUT_S", 1.0)
    # Evaluated, this holds the interpreter lock for hours.
    assert math_verify(about("3"), "$\\boxed{9^{9^{9}}}$") == 0
    assert math_verify(about("9"), "$\\boxed{9}$") == 1


def test_the_source_of_a_row_picks_the_rule() -> None:
    assert rule_for_source("openai/gsm8k") == "gsm8k"
    for source in ("lighteval/MATH", "aime_2024"):
        assert rule_for_source(source) == "math_verify"
    with pytest.raises(ConfigError, match="'codeforces'"):
        rule_for_source("codeforces")


@pytest.mark.parametrize(
    "name", ["gsm8", "no_such_module_here:fn", "json:no_such_function", ":fn", "json:__name__"]
)
def test_a_reward_that_can_not_be_found_is_refused_by_its_key_and_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^task\\.reward .*'{name}'"):
        opened(name)


@pytest.mark.parametrize(("parameters", "is_taken"), [
    ("response", False), ("prompt, response, answer, extra", False), ("question, response, scale=2.0", True),
])
def test_a_reward_that_does_not_take_two_arguments_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, is_taken: bool
) -> None:
    module = f"reward_of_{len(parameters)}"
    (tmp_path / f"{module}.py").write_text(f"def score({parameters}): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    if is_taken:
        assert opened(f"{module}:score")(about("3"), "It is 3") == 1
    else:
        with pytest.raises(ConfigError, match=rf"^task\.reward '{module}:score' .*\({parameters}\)"):
            opened(f"{module}:score")
