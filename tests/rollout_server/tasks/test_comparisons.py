from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.tasks.comparisons import ComparedAnswers, ComparisonFile, read_comparisons, split_by_prompt
from tests.kit.configs import make_config
from tests.kit.data_files import TOKENIZER, written

USER = {"role": "user", "content": "Hi?"}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(tmp_path: Path, *rows: dict[str, Any], suffix: str = "jsonl", **task: Any) -> ComparisonFile:
    file = written(tmp_path / f"rows.{suffix}", list(rows))
    config = make_config(task={"max_prompt_tokens": 64, **task}, rollout={"max_response_tokens": 8})
    return read_comparisons(config, file, "reward_training.path", TOKENIZER)


def texts(compared: ComparedAnswers) -> list[str]:
    return [TOKENIZER.decode([*each.prompt, *each.answer]) for each in compared.answers]


@pytest.mark.parametrize("row", [
    {"prompt": "Hi?", "chosen": "yes", "rejected": "no"},
    {"prompt": [USER], "chosen": [reply("yes")], "rejected": [reply("no")]},
    {"prompt": [USER], "chosen": "yes", "rejected": "no"},
    {"chosen": [USER, reply("yes")], "rejected": [USER, reply("no")]},
    {"prompt": "another", "chosen": [USER, reply("yes")], "rejected": [USER, reply("no")]},
    {"prompt": "Hi?", "answers": ["yes", "no"]},
    {"prompt": [USER], "answers": [[reply("yes")], [reply("no")]], "ranks": [4, 7]},
])  # fmt: skip
def test_pairs_in_trls_columns_and_rankings_are_read_as_the_policy_would_answer(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    for suffix in ("jsonl", "parquet"):
        (compared,) = read(tmp_path, row, suffix=suffix).comparisons
        assert texts(compared) == ["Hi?<sep>yes<eos>", "Hi?<sep>no<eos>"]
        assert compared.pairs == [(0, 1, 0.0)] and compared.prompt == "Hi?<sep>"


def test_margins_ranks_and_ties(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"prompt": "a", "chosen": "x", "rejected": "y", "margin": 0.5},
        {"prompt": "a", "chosen": "x", "rejected": "y", "margin": None},
        {"prompt": "b", "answers": ["x", "y", "z"]},
        {"prompt": "c", "answers": ["x", "y", "z"], "ranks": [2, 1, 2]},
        {"prompt": "d", "answers": ["x", "y"], "ranks": [1, 1]},
    )  # fmt: skip
    assert [each.pairs for each in found.comparisons] == [
        [(0, 1, 0.5)], [(0, 1, 0.0)], [(0, 1, 0.0), (0, 2, 0.0), (1, 2, 0.0)], [(1, 0, 0.0), (1, 2, 0.0)],
    ]  # fmt: skip
    assert found.all_tied == 1


def test_what_a_run_would_not_allow_is_left_out_and_counted(tmp_path: Path) -> None:
    pair = {"prompt": "abc", "chosen": "x", "rejected": "y"}
    long_answer, long_prompt = {**pair, "rejected": "y" * 8}, {**pair, "prompt": "a" * 64}
    found = read(tmp_path, pair, long_answer, long_prompt)
    assert (len(found.comparisons), found.too_long) == (1, 2)
    with pytest.raises(ConfigError, match=r"^reward_training\.path"):
        read(tmp_path, long_answer)


@pytest.mark.parametrize(("row", "named"), [
    ({"chosen": "a"}, "chosen"), ({"prompt": "a", "chosen": "x", "rejected": 3}, "row 0: rejected"),
    ({"chosen": "Human: a Assistant: x", "rejected": "y"}, "row 0: chosen"),
    ({"chosen": [USER], "rejected": [USER]}, "row 0: chosen .*'user'"),
    ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": "big"}, "row 0: margin .*'big'"),
    ({"prompt": "a", "answers": ["x"]}, "row 0: answers"),
    ({"prompt": "a", "answers": ["x", "y"], "ranks": [1]}, "row 0: ranks"),
    ({"prompt": "a", "answers": ["x", "y"], "ranks": [1, 0.5]}, "row 0: ranks"),
])  # fmt: skip
def test_a_row_of_another_form_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl.*{named}"):
        read(tmp_path, row)


def test_held_out_comparisons_have_other_prompts() -> None:
    made = [ComparedAnswers(f"{number // 2}", [], []) for number in range(40)]
    train, held_out = split_by_prompt(made, 0.1, seed=0)
    assert (len(train), len(held_out)) == (36, 4)
    assert not {each.prompt for each in train} & {each.prompt for each in held_out}
    assert split_by_prompt(made, 0.1, seed=0) == (train, held_out) != split_by_prompt(made, 0.1, seed=1)
    assert split_by_prompt(made, 0.0, seed=0) == (made, [])
    with pytest.raises(ConfigError, match=r"^reward_training\.held_out"):
        split_by_prompt(made[:2], 0.1, seed=0)
