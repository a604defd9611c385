"""A row of the exported trajectories gets the ground truth of its own question, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config
from rollout_server.tasks.base import open_task
from rollout_server.tasks.trajectory_texts import TrajectoryTexts
from tests.kit.configs import changed, make_config
from tests.kit.data_files import TOKENIZER, sums, written


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The configuration of a run over eight questions, in its directory."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    path = written(tmp_path / "sums.jsonl", sums("a", 8))
    config = make_config(tmp_path / "model", task={"name": "", "path": path, "reward": "math:gcd"},
        eval={"num_prompts": 0})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    return config


def journalled_row(config: Config, index: int, has_tokens: bool = True, **changes: Any) -> dict[str, Any]:
    prompt = open_task(config, TOKENIZER).prompt(index)
    tokens = {"prompt_tokens": prompt.tokens, "tokens": prompt.tokens} if has_tokens else {}
    return {"prompt_index": index, "data_row": prompt.data_row, "turns": None, **tokens, **changes}


def truths(run_dir: Path, *rows: dict[str, Any]) -> list[str | None]:
    texts = TrajectoryTexts(run_dir)
    for row in rows:
        texts.add(row)
    found = [row["ground_truth"] for row in rows]
    assert texts.num_without == found.count(None)
    return found


def test_rows_of_one_task_have_the_ground_truth_of_their_question(config: Config, tmp_path: Path) -> None:
    row = journalled_row(config, 0)
    expected = str(row["data_row"])
    of_turns = journalled_row(config, 0, turns=2, prompt_tokens=[1, 2])  # those with the tools, say
    old = journalled_row(config, 0, has_tokens=False)
    unknown = journalled_row(config, 0, has_tokens=False, data_row=-1)
    assert truths(tmp_path, row, of_turns, old, unknown) == [expected, expected, expected, None]
    assert row["prompt_text"].startswith(f"a{row['data_row']}?") and old["prompt_text"] is None


def test_rows_from_before_another_seed_have_no_ground_truth_of_another_question(
    config: Config, tmp_path: Path
) -> None:
    before = [journalled_row(config, index) for index in range(8)]
    again = changed(config, run={"seed": 7})
    (tmp_path / "config.yaml").rename(tmp_path / "config.lineage_0.yaml")
    (tmp_path / "config.yaml").write_text(dump_config(again))
    found = truths(tmp_path, *before)
    assert None in found
    assert all(truth in (None, str(row["data_row"])) for truth, row in zip(found, before, strict=True))


@pytest.mark.parametrize("path", ["/sft/model", f"hf://nobody/no-such-model@{'0' * 40}"])
def test_a_copied_run_has_texts_by_the_tokenizer_of_its_model(path: str, config: Config, tmp_path: Path) -> None:
    row = journalled_row(config, 0)
    (tmp_path / "config.yaml").write_text(dump_config(changed(config, model={"path": path})))
    assert truths(tmp_path, row) == [str(row["data_row"])]
