"""Answers that a scorer of reasoning_gym may run as Python are scored apart: they harm neither the run nor others."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from async_rl.base.config import Config
from async_rl.base.config.task_parts import SandboxConfig
from async_rl.base.errors import ConfigError, RewardError
from learner.models.tiny_model import character_tokenizer
from rollout_server.question import Question
from rollout_server.rewards.scoring import Scoring, open_rewards
from rollout_server.tasks import reasoning_gym_scorer
from rollout_server.tasks.base import Task, open_task
from rollout_server.tasks.reasoning_gym_answers import only_compares
from tests.kit.configs import changed, make_config
from tests.kit.rewards import told
from tests.kit.sandbox import needs_bubblewrap

TOKENIZER = character_tokenizer()
sandboxes = pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_bubblewrap), "none"])


def config_of(name: str, sandbox: str = "bubblewrap", **task: Any) -> Config:
    return make_config(
        task={
            "name": f"reasoning_gym/{name}", "size": 4, "sandbox": {"kind": sandbox}, "max_prompt_tokens": 8000, **task,
        },
        eval={"num_prompts": 0},
    )


@cache
def opened(name: str, sandbox: str = "bubblewrap") -> tuple[Task, Question]:
    """The task of a dataset, whose sandbox lives as long as the tests."""
    task = open_task(config_of(name, sandbox), TOKENIZER)
    return task, task.prompt(0).question


def directly(name: str, question: Question, answer: str) -> float:
    """The score that the package itself gives."""
    dataset = DATASETS[name][0](DATASETS[name][1]())
    text = question.messages[-1]["content"]
    entry = {"question": text, "answer": question.ground_truth, "metadata": question.extra}
    return float(dataset.score_answer(answer=answer, entry=entry))


def expanded(product: str) -> str:
    """The terms of a polynomial in the other order."""
    return " ".join(f"{sign or '+'}{term}" for sign, term in re.findall(r"([+-]?) ?([^ +-]+)", product)[::-1])


@pytest.mark.processes
@sandboxes
@pytest.mark.parametrize(("name", "answers", "scores"), [
    ("string_insertion",
     lambda right: [right, repr(list(right)), f"x{right}", "", "nonsense", "<answer>A</answer>", "[1, 2"],
     [1, 0.1, 0, 0, 0, 0, 0]),
    ("countdown", lambda right: [right, f"({right}) + 0", f"({right})*1", "1 + 1", "no", "1 +"],
     [1, None, None, 0.05, 0.01, 0.01]),
    ("polynomial_multiplication", lambda right: [right, expanded(right), right.replace("**", "^"), "x + 1", "?"],
     [1, 1, None, 0, 0]),
])  # fmt: skip
def test_honest_answers_get_the_scores_of_the_package(
    sandbox: str, name: str, answers: Callable[[str], list[str]], scores: list[float | None]
) -> None:
    task, question = opened(name, sandbox)
    given = answers(question.ground_truth)
    found = [task.verify(question, answer) for answer in given]
    assert found == [directly(name, question, answer) for answer in given]
    assert [score for score, known in zip(found, scores, strict=True) if known is not None] == [
        known for known in scores if known is not None
    ]


@pytest.mark.processes
@sandboxes
def test_an_answer_that_runs_code_does_not_change_the_score_of_a_later_one(sandbox: str) -> None:
    task, question = opened("string_insertion", sandbox)
    spoiled = "setattr(type(self), 'score_answer', lambda *a, **k: 1.0) or setattr(self, 'score_answer', print) or ''"
    assert task.verify(question, spoiled) == 0
    assert [task.verify(question, answer) for answer in ("wrong by now", question.ground_truth)] == [0, 1]
    assert task.verify(question, "__import__('os').kill(__import__('os').getpid(), 9)") == 0
    assert task.verify(question, "exit()") == task.verify(question, "wrong too") == 0
    if sandbox == "none":
        return
    trace = "__import__('ctypes').CDLL(None).ptrace(16, __import__('os').getppid(), 0, 0)"
    traces = f"oracle_answer if {trace} == 0 else ''"
    assert task.verify(question, traces) == 0


@pytest.mark.processes
@pytest.mark.parametrize(("sandbox", "score"), [pytest.param("bubblewrap", 0, marks=needs_bubblewrap), ("none", 0.1)])
def test_an_answer_reads_a_file_of_the_run_only_without_a_sandbox(tmp_path: Path, sandbox: str, score: float) -> None:
    (tmp_path / "key").write_text("sesame")
    task, question = opened("string_insertion", sandbox)
    reads = f"oracle_answer if open({str(tmp_path / 'key')!r}).read() == 'sesame' else ''"
    assert task.verify(question, reads) == score
    assert task.verify(question, reads.replace("sesame", "another")) == 0


@pytest.mark.processes
@needs_bubblewrap
def test_an_answer_can_forge_its_own_score_but_to_no_more_than_a_right_one_has() -> None:
    task, question = opened("string_insertion")
    forged = "[__import__('os').write(1, b'\\n' + {} + b'\\n'), __import__('os')._exit(0)]"
    numbers = ["b'1.0'", "b'7.0'", "b'-1.0'", "b'nan'", "b'1e9999'", "b'0' * 1000", "b'[' * 1000", "b'\\xff'"]
    assert [task.verify(question, forged.format(each)) for each in numbers] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert task.verify(question, "oracle_answer") == 0.1  # by the scorer itself: the right answer as a list of letters


@pytest.mark.processes
@sandboxes
@pytest.mark.parametrize("limit", ["CPU_S", "WALL_S"])
def test_an_answer_that_takes_for_ever_is_wrong_and_the_worker_lives_meanwhile(
    monkeypatch: pytest.MonkeyPatch, sandbox: str, limit: str
) -> None:
    config = config_of("string_insertion", sandbox)
    task, _ = opened("string_insertion", sandbox)
    prompt = task.prompt(0)
    assert task.verify(prompt.question, "wrong") == 0  # the server has started
    monkeypatch.setattr(reasoning_gym_scorer, limit, 1.0)
    endless, ticks = "9**9**9", 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def score() -> list[tuple[float | None, dict[str, float]]]:
        scoring, ticking = Scoring(config, open_rewards(config, task)), asyncio.create_task(tick())
        try:
            verdicts = await scoring.score(prompt.question, [told(endless), told(prompt.question.ground_truth)])
        finally:
            ticking.cancel()
            await scoring.aclose()
        return [(verdict.reward, dict(verdict.values)) for verdict in verdicts]

    assert asyncio.run(score()) == [(0, {"task/late": 1}), (1, {"task/late": 0})]
    assert ticks >= 10
    # it would take as long once more to find out
    assert [task.has_answer(prompt, each) for each in (endless, "never scored", "wrong")] == [None, None, True]


@pytest.mark.processes
@needs_bubblewrap
def test_a_scorer_that_can_not_read_the_right_answer_fails_the_group_and_says_why() -> None:
    task, question = opened("prime_factorization")
    assert task.verify(question, "abc") == 0  # int("abc") raises in the scorer
    prompt = task.prompt(0)
    assert [task.has_answer(prompt, each) for each in ("abc", " ", question.ground_truth)] == [False, False, True]
    broken = dataclasses.replace(question, ground_truth="abc")
    with pytest.raises(RewardError, match=r"reasoning_gym/prime_factorization .*'abc'.*ValueError"):
        task.verify(broken, "x")


def test_listed_scorers_only_compare_an_answer() -> None:
    datasets = {name: DATASETS[name][0](DATASETS[name][1]()) for name in set(DATASETS) - {"composite"}}
    comparing = {name for name, dataset in datasets.items() if only_compares(name, dataset)}
    for name in comparing:
        text = inspect.getsource(DATASETS[name][0].score_answer)
        assert not re.search(r"eval\(|exec\(|parse_expr|\bre\.|json\.|np\.|\bint\(", text), name
    runs = {
        "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24",
        "polynomial_multiplication", "simple_integration", "intermediate_integration",
    }  # fmt: skip
    assert len(comparing) > 40 and runs < set(DATASETS) and not runs & comparing


def about(name: str, **sandbox: str) -> str:
    config = changed(config_of(name), task={"sandbox": SandboxConfig(**sandbox)})  # type: ignore[arg-type]
    (reward,) = open_rewards(config, open_task(config, TOKENIZER))
    return reward.about


@pytest.mark.processes
def test_a_run_is_refused_where_answers_that_its_scorer_may_run_are_not_contained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"task\.sandbox\.kind: none"):
        about("countdown")
    with pytest.raises(ConfigError, match=r"task\.sandbox\.url"):
        about("countdown", url="http://127.0.0.1:1")
    assert "none" in about("countdown", kind="none")
    assert about("spell_backward") == about("spell_backward", kind="none") == ""
