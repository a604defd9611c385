from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config, TaskConfig
from async_rl.base.errors import ConfigError
from rollout_server.rewards.rules import gsm8k
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import Task, open_task
from rollout_server.tasks.gsm8k import prepare_gsm8k
from tests.kit.configs import make_config
from tests.kit.data_files import TOKENIZER, written

GSM8K = Path("/work/shared/data/gsm8k")


def row_of(i: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {i} + 1?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i},
    }
    return {**row, **changes}


def opened(path: str | Path, *, eval_path: str = "", eval_size: int = 0, **task: Any) -> tuple[Config, Task]:
    config = make_config(task=TaskConfig(path=str(path), eval_path=eval_path, **task), eval={"num_prompts": eval_size})
    return config, open_task(config, TOKENIZER)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_become_prompts_and_their_source_picks_the_rule(tmp_path: Path, suffix: str) -> None:
    config, task = opened(written(tmp_path / f"rows{suffix}", [row_of(i) for i in range(10)]))
    reward = open_rewards(config, task)[0].reward.function
    assert task.num_prompts == 10
    prompts = [task.prompt(i) for i in range(10)]
    assert sorted(p.text for p in prompts) == sorted(f"Be brief.\nWhat is {i} + 1?<sep>" for i in range(10))
    assert prompts != [task.prompt(i) for i in range(10, 20)]  # the next epoch, in another order
    for prompt in prompts:
        question, answer = prompt.question, prompt.question.ground_truth
        assert prompt.text == f"Be brief.\nWhat is {int(answer) - 1} + 1?<sep>"
        assert prompt.question.extra == {"index": int(answer) - 1}
        assert (reward(question, f"#### {answer}"), reward(question, f"It is {answer}")) == (1, 0)


@pytest.mark.parametrize(("changes", "named"), [
    ({"prompt": 7}, "row 1: prompt "), ({"prompt": []}, "row 1: prompt "),
    ({"prompt": [{"role": "user", "content": " \n"}]}, "row 1: prompt "),
    ({"reward_model": {"style": "rule"}}, r"row 1: reward_model\.ground_truth "),
    ({"reward_model": {"style": "rule", "ground_truth": None}}, r"row 1: reward_model\.ground_truth "),
    ({"extra_info": [1, 2]}, "row 1: extra_info "),
    ({"data_source": "poems"}, "data_source 'poems'"),
])  # fmt: skip
def test_a_row_that_can_not_be_used_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        opened(written(tmp_path / "rows.jsonl", [row_of(0), row_of(1, **changes)]))


def test_tests_of_programs_that_can_be_cheated_are_a_caution_with_their_rows(tmp_path: Path) -> None:
    rows = [row_of(i, reward_model={"ground_truth": json.dumps({"assert_case": ["assert f(1) == 2", each]})})
            for i, each in enumerate(("assert f(2) == 3", "assert f(2) == g(3)"))]  # fmt: skip
    path = written(tmp_path / "rows.jsonl", rows)
    _, task = opened(path, reward="code")
    assert task.num_prompts == 2
    (caution,) = task.cautions
    assert "row 1, assert_case[1]" in caution
    _, task = opened(written(tmp_path / "sound.jsonl", rows[:1]), reward="code")
    assert task.cautions == []


@pytest.mark.parametrize(("name", "content", "named"), [
    ("a.jsonl", "{broken\n", r"a\.jsonl, line 1"), ("a.jsonl", "[1]\n", r"a\.jsonl, line 1"),
    ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', r"a\.jsonl, line 2"),
    ("a.jsonl", '{"prompt": ' + "[" * 100_000, r"a\.jsonl, line 1"), ("a.jsonl", "", r"a\.jsonl"),
    ("a.parquet", "no parquet", r"a\.parquet"), ("a.arrow", "no arrow", r"a\.arrow"), ("a.txt", "x", r"a\.txt"),
    ("a.csv", 'prompt,answer\n"cut', r"a\.csv"), ("nowhere.parquet", None, r"nowhere\.parquet"),
])  # fmt: skip
def test_an_unreadable_file_is_named_with_the_line(tmp_path: Path, name: str, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path / name)


SEPARATORS = "one\u2028two\u2029three\u0085four"
"""str.splitlines cuts at these characters, which are not line feeds."""


def test_a_jsonl_line_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    row = row_of(0, prompt=[{"role": "user", "content": SEPARATORS}])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    _, task = opened(tmp_path / "rows.jsonl")
    assert [message["content"] for message in task.train_question(0).messages] == [SEPARATORS]

    item = {"question": SEPARATORS, "answer": "#### 1"}
    (tmp_path / "in.jsonl").write_text(json.dumps(item, ensure_ascii=False) + "\n", encoding="utf-8")
    assert prepare_gsm8k(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 1


def test_long_prompts_are_skipped_and_counted_or_leave_nothing(tmp_path: Path) -> None:
    long = row_of(1, prompt=[{"role": "user", "content": "x" * 100}])
    path = written(tmp_path / "rows.jsonl", [row_of(0), long, row_of(2)])
    _, task = opened(path, max_prompt_tokens=60)
    assert (task.num_prompts, task.skipped_long) == (2, 1)
    with pytest.raises(ConfigError, match=r"task\.max_prompt_tokens = 10\D") as caught:
        opened(path, max_prompt_tokens=10)
    shortest = int(re.findall(r"\d+", str(caught.value))[-1])
    assert opened(path, max_prompt_tokens=shortest)[1].num_prompts >= 1


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the original GSM8K files are not in {GSM8K}")
def test_every_reference_solution_of_gsm8k_scores_1(tmp_path: Path) -> None:
    source, count = GSM8K / "test.jsonl", 1319
    assert prepare_gsm8k(source, tmp_path / "gsm8k.parquet") == count
    _, task = opened(tmp_path / "gsm8k.parquet", max_prompt_tokens=2000)
    assert (task.num_prompts, task.skipped_long) == (count, 0)
    questions = [task.train_question(i) for i in range(count)]
    originals = [json.loads(line) for line in source.read_text().splitlines()]
    assert all(task.verify(q, o["answer"]) == 1 for q, o in zip(questions, originals, strict=True))
    assert all(gsm8k(q, q.solution, flexible=True) == 1 for q in questions)
    assert not any(task.verify(q, o["answer"] + "1") for q, o in zip(questions, originals, strict=True))


@pytest.mark.parametrize("line", ['{"question": "?"}', "nonsense", '{"question": "?", "answer": "#### Head"}'])
def test_prepare_names_the_line_it_can_not_use_and_an_empty_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"question": "?", "answer": "#### 42"}\n' + line)
    (tmp_path / "empty.jsonl").touch()
    for name, named in (("in.jsonl", "line 2"), ("empty.jsonl", "empty")):
        with pytest.raises(ConfigError, match=rf"{name}.*{named}"):
            prepare_gsm8k(tmp_path / name, tmp_path / "out.parquet")
