from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import TaskConfig
from async_rl.errors import ConfigError, RewardError
from rollout_server.question import Question
from rollout_server.rewards import math_checker
from rollout_server.rewards.base import open_rewards
from rollout_server.rewards.rules import gsm8k, math_verify, rule_for_source
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


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("48 / 2 = 24\n48 + 24 = 72\n#### 72", 1, 1),
        ("#### 72", 1, 1),
        # As in verl the marked number is compared as text, and follows `####` and one space.
        ("####72", 0, 1),
        ("####  72", 0, 1),
        ("#### 72.", 0, 1),
        ("#### 72.0", 0, 1),
        ("#### 72.00", 0, 1),
        ("#### 072", 0, 1),
        ("#### ,72", 1, 1),
        ("#### 72,", 1, 1),
        ("#### 7\nno, #### 72", 1, 1),  # the last marked number counts
        ("#### 72\nno, #### 7", 0, 0),
        ("The answer is 72.", 0, 1),  # not marked
        ("The answer is 72. I am 90 % sure", 0, 0),
        ("#### seventy-two", 0, 0),
        ("#### 72 apples and 3 pears", 1, 0),
        ("#### $72", 0, 1),
        ("#### -72", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_rule(response: str, strict: int, flexible: int) -> None:
    assert gsm8k(about("72"), response) == strict
    assert gsm8k(about("72"), response, flexible=True) == flexible


@pytest.mark.parametrize(
    ("response", "answer", "strict", "flexible"),
    [
        ("#### 1,234,567", "1234567", 1, 1),
        ("#### 1234567", "1,234,567", 1, 1),  # verl ignores separators in the response only
        ("#### -3", "-3", 1, 1),
        ("#### .5", ".5", 1, 1),
        ("#### .5", "0.5", 0, 1),
        ("#### 3.50", "3.5", 0, 1),
        ("#### 3.5", "3", 0, 0),
        ("#### 72", 72, 1, 1),
        ("#### 72", 72.0, 1, 1),  # a column of pandas
        ("#### 0.5", 0.5, 1, 1),
        ("#### 72", " 72\n", 1, 1),
    ],
)
def test_gsm8k_ignores_thousands_separators_only(response: str, answer: object, strict: int, flexible: int) -> None:
    assert gsm8k(about(answer), response) == strict
    assert gsm8k(about(answer), response, flexible=True) == flexible


def test_gsm8k_looks_at_the_last_300_characters_only() -> None:
    answer = "#### 72"
    assert gsm8k(about("72"), answer + "x" * (300 - len(answer))) == 1
    assert gsm8k(about("72"), answer + "x" * (301 - len(answer))) == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is $\\boxed{0.5}$", "\\frac12", 1),
        ("#### 42", "42", 1),
        ("The result is $x = 43$.", "42", 0),
        ("$\\boxed{\\{1, 2\\}}$", "\\{2, 1\\}", 1),
        ("I do not know", "42", 0),
        ("$\\boxed{", "42", 0),
    ],
)
def test_math_verify_rule(response: str, answer: str, reward: int) -> None:
    assert math_verify(about(answer), response) == reward


@pytest.mark.processes
@pytest.mark.parametrize(
    ("response", "answer", "other"),
    [
        ("<think>It may be \\boxed{24}. No.</think>\nThe answer is 72.", "72", "24"),
        ("<think>The answer is 24. No.</think>\n\nIt is 72.", "72", "24"),
        ("<answer>7</answer>", "7", "9"),
        ("<think>It is 24</think><answer>\n72 clips</answer> I hope", "72", "24"),
        ("<answer>24</answer> is wrong: <answer>\\boxed{72}</answer>", "72", "24"),
        ("<think>Either 1 or 2</think> so <answer>3 1/2", "3 1/2", "5"),
        ("\\boxed{72} in <answer> tags.", "72", "24"),
        ("\\boxed{72} in <answer> tags, as step 2 says.", "72", "2"),
        ("\\boxed{72} <answer>see above</answer>", "72", "24"),
        ("\\boxed{72} <answer>The number in the box</answer>", "72", "24"),
        ("\\boxed{72}, in <answer> and </answer> tags", "72", "24"),
        ("First \\boxed{24}. Then corrected. <answer>72", "72", "24"),
        ("First \\boxed{24}. Then corrected. <answer> $x = 72$", "72", "24"),
        ("3 x 4 = 12. <answer>I don't know</answer>", "none", "12"),
        ("3 x 4 = 12. <answer>see above</answer>", "none", "12"),
        ("It is \\boxed{12}? <answer>No solution</answer>", "none", "12"),
        ("It is \\boxed{12}? <answer>None of the above</answer>", "none", "12"),
        ("<think>a</think>Candidates 11, 12. <answer>n</answer>", "none", "12"),
        ("\\boxed{24} is wrong: <answer>72</answer>, written in <answer> tags.", "72", "24"),
        ("I write it in <answer> tags: \\boxed{72}", "72", "24"),
        ("<think>It is \\boxed{24}.</think>\n", "24", "72"),
        ("<think>It is \\boxed{24}.</think>\nI do not know.", "none", "24"),
    ],
)
def test_math_verify_compares_what_follows_the_thoughts(response: str, answer: str, other: str) -> None:
    assert [math_verify(about(each), response) for each in (answer, other)] == [float(answer != "none"), 0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("response", "right", "wrong"),
    [
        ("So it is \\boxed{41}. Wait, I forgot one, so it is \\boxed{42}.", "42", "41"),
        ("First \\boxed{\\frac{1}{2}}, then \\boxed{41}, and finally $\\boxed{42}$", "42", "41"),
        ("\\boxed{5}. Wait, it is \\boxed{41} and \\boxed{42}.", "41, 42", "42"),
        ("$x=\\boxed{41} \\text{ or } \\boxed{42}$", "41, 42", "42"),
        ("The one is \\boxed{41}, the other is \\boxed{42}.", "41, 42", "41"),
        ("It is \\boxed{\\boxed{42}}, I am sure.", "42", "41"),
        ("The final answer is $41$. I hope it is correct. \\boxed{0} or rather \\boxed{42}", "42", "41"),
        ("\\boxed{0}. The final answer is $41$. I hope so. No: \\boxed{42}", "42", "41"),
        ("\\boxed{0}, no, \\boxed{42}. The final answer is $41$. I hope it is.", "42", "41"),
        ("Answer: $41$. \\boxed{(} and then \\boxed{42}", "42", "41"),
        ("$\\boxed{42}$ hmm, no, it is \\boxed{ 41", "42", "41"),  # cut off
    ],
)
def test_math_verify_takes_the_last_box_where_words_stand_before_it(response: str, right: str, wrong: str) -> None:
    assert [math_verify(about(each), response) for each in (right, wrong)] == [1, 0]


@pytest.mark.processes
def test_math_verify_works_from_several_threads_at_once() -> None:
    found = {}

    def check(n: int) -> None:
        response = f"$\\boxed{{{n}}}$"
        found[n] = math_verify(about(str(n)), response), math_verify(about(str(n + 1)), response)

    threads = [threading.Thread(target=check, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(8), (1, 0))


@pytest.mark.processes
def test_math_verify_works_where_a_thousand_files_and_more_are_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert math_checker.MathChecker().is_equal("the answer is \\boxed{4}", "4")
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.processes
def test_an_answer_that_takes_hours_to_compare_is_wrong_and_the_next_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.rewards.math_checker.CHECK_TIMEOUT_S", 1.0)
    # Evaluated, this holds the interpreter lock for hours.
    assert math_verify(about("3"), "$\\boxed{9^{9^{9}}}$") == 0
    assert math_verify(about("9"), "$\\boxed{9}$") == 1


@pytest.mark.processes
def test_a_math_verify_process_that_hangs_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    checker = math_checker.MathChecker()
    with monkeypatch.context() as patch:
        patch.setattr(math_checker, "_start", start)
        patch.setattr(math_checker, "ANSWER_TIMEOUT_S", 0.2)
        with pytest.raises(RewardError, match=r"math-verify process \d+ did not answer for 0 s"):
            checker.is_equal("1", "1")
    assert started[0].wait(10) == -signal.SIGKILL
    assert checker.is_equal("$\\boxed{9}$", "9")  # another takes its place


@pytest.mark.processes
def test_an_answer_that_finds_every_math_verify_process_busy_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker = math_checker.MathChecker()
    for _ in range(math_checker.num_children()):
        checker._idle.get()
    monkeypatch.setattr(math_checker, "IDLE_TIMEOUT_S", 0.1)
    with pytest.raises(RewardError, match=r"waited 0 s for one of the \d+ math-verify processes"):
        checker.is_equal("1", "1")


@pytest.mark.parametrize(("cores", "children"), [(1, 2), (2, 2), (12, 12), (128, 32)])
def test_there_is_a_math_verify_process_for_each_core_within_bounds(
    monkeypatch: pytest.MonkeyPatch, cores: int, children: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert math_checker.num_children() == children


@pytest.mark.parametrize("name", ["gsm8k", "math_verify", "", "posixpath:join"])
def test_no_more_threads_score_by_a_rule_than_there_are_math_verify_processes(name: str) -> None:
    (found,) = open_rewards(changed(CONFIG, task={"reward": name}), Verifies())
    assert found.at_once(found.reward.function) == (32 if ":" in name else math_checker.num_children())


def test_the_source_of_a_row_picks_the_rule() -> None:
    assert rule_for_source("openai/gsm8k") == "gsm8k"
    for source in ("lighteval/MATH", "HuggingFaceH4/MATH-500", "aime_2024", "amc23", "math_dapo"):
        assert rule_for_source(source) == "math_verify"
    with pytest.raises(ConfigError, match=r"'codeforces'.*gsm8k, gsm8k_flexible, math_verify"):
        rule_for_source("codeforces")


def test_a_rule_is_named_in_the_config() -> None:
    def reward(name: str) -> float:
        return opened(name)(about("3"), "It is 3")

    assert reward("gsm8k") == 0
    assert reward("gsm8k_flexible") == 1


def test_a_custom_function_gets_the_question_and_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "seen = []\ndef score(*arguments):\n    seen.append(arguments)\n    return 0.25\n"
    (tmp_path / "rewards_in_cwd.py").write_text(code)
    monkeypatch.chdir(tmp_path)  # the user's module is found where the command is run
    assert opened("rewards_in_cwd:score")(about("3"), "It is 3") == 0.25
    assert sys.modules["rewards_in_cwd"].seen == [(about("3"), "It is 3")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "Did you mean gsm8k"),
        ("no_such_module_here:fn", "No module named 'no_such_module_here'"),
        ("json:no_such_function", r"json.__init__\.py defines no no_such_function"),
        (":fn", "package.module:name, got ':fn'"),
        (".x:fn", "package.module:name, got '.x:fn'"),
        ("json:__name__", "not a function but str"),
    ],
)
def test_a_reward_that_can_not_be_found_is_a_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(name)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(:\n", r"SyntaxError: invalid syntax \(broken_0\.py, line 1\)"),
        ("\nscore = undefined\n", r"NameError: name 'undefined' is not defined, at .*broken_1\.py:2"),
        ("int('x')\n", r"ValueError: invalid literal for int.*, at .*broken_2\.py:1"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3, at .*broken_3\.py:2"),
    ],
)
def test_a_reward_module_that_raises_is_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    module = "broken_" + re.findall(r"broken_(\d)", message)[0]
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"task\.reward '{module}:score' can't be imported from .*: {message}"):
        opened(f"{module}:score")


@pytest.mark.parametrize(
    ("parameters", "takes"),
    [("response", "(response)"), ("prompt, response, answer, extra", "(prompt, response, answer, extra)")],
)
def test_a_reward_with_another_number_of_parameters_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, takes: str
) -> None:
    module = f"reward_of_{len(parameters)}"
    (tmp_path / f"{module}.py").write_text(f"def score({parameters}): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = rf"must be a `def score\(question, response\)`, got score{re.escape(takes)}: .*The question has messages"
    with pytest.raises(ConfigError, match=message):
        opened(f"{module}:score")


@pytest.mark.parametrize("parameters", ["*arguments", "question, response, scale=2.0"])
def test_a_reward_that_two_arguments_suit_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str
) -> None:
    module = f"reward_with_{len(parameters)}"
    (tmp_path / f"{module}.py").write_text(f"def score({parameters}): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert opened(f"{module}:score")(about("3"), "It is 3") == 1
