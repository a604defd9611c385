"""An episode and an error lead back to the row of the data file: in the journal, the export, and on the console."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from async_rl.base.config import BufferConfig, Config, TaskConfig
from async_rl.cli import main
from buffer.journal import FILE_NAME
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.question import Question
from rollout_server.tasks.base import open_task
from tests.kit.configs import changed, worker_config
from tests.kit.documents import DOCUMENTS, blocks
from tests.kit.engines.fakes import TOKENIZER, TalkingEngine
from tests.kit.models import save_tiny_model
from tests.kit.worker import rolled_out

QUESTIONS = ["a", "too long " * 20, "b", "fails", "c", "fails at times", "d"]
FAILS, FAILS_AT_TIMES = 3, 5


class Asks:
    """Asks a question that does not show which one it is. It fails for one, and for another in four attempts."""

    tools: Sequence[Any] = ()
    num_failed = 0

    def __init__(self, question: Question) -> None:
        self._text = question.messages[0]["content"]

    async def start(self) -> list[Message]:
        return [user("?")]

    async def step(self, reply: Message) -> Step:
        if self._text == "fails":
            raise KeyError("plum")
        if self._text == "fails at times" and Asks.num_failed < 4:  # one of the three episodes fails twice
            Asks.num_failed += 1
            raise ValueError(f"no shop \ud83d {'x' * 5000}")
        return Step(reward=1.0, done=True)

    async def close(self) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    rows = [
        {"data_source": "shop", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"style": "rule", "ground_truth": ""}}
        for text in QUESTIONS
    ]  # fmt: skip
    (tmp_path / "orders.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    config = worker_config(tmp_path / "model")
    task = TaskConfig(path=str(tmp_path / "orders.jsonl"), env=f"{__name__}:Asks", max_prompt_tokens=64, max_failures=9)
    Asks.num_failed = 0
    return changed(
        config, task=task, eval={"num_prompts": 0}, buffer=BufferConfig(), run={"dir": tmp_path, "name": "run"},
        learner={"prompts_per_step": 5},
    )


def no_reward(*_: Any) -> float:
    raise AssertionError("the environment gives the rewards")


@pytest.mark.filterwarnings("ignore:task.eval_path is not set")
def test_errors_lead_back_to_their_rows(config: Config) -> None:
    _, reports, *_ = rolled_out(config, TalkingEngine(lambda last, number, n: "x"), no_reward, steps=2)
    with closing(sqlite3.connect(config.run_dir / FILE_NAME)) as database:
        errors = database.execute("SELECT DISTINCT data_row, what, error FROM errors").fetchall()
        rows = dict(database.execute("SELECT group_id, data_row FROM groups WHERE state <> 'running'"))
        (query,) = [query for query in blocks(DOCUMENTS["docs/reference/run-directory.md"], "sql") if "errors" in query]
        counted = database.execute(query).fetchall()
    task = open_task(config, TOKENIZER)
    assert {task.prompt(index).data_row for index in range(6)} == {0, 2, 3, 4, 5, 6}, "one is too long"
    (dropped,) = [error for row, what, error in errors if (row, what) == (FAILS, "dropped")]
    assert "KeyError: 'plum'" in dropped
    ((row, left_out),) = [(row, error) for row, what, error in errors if what == "left out"]
    assert row == FAILS_AT_TIMES and r"ValueError: no shop \ud83d xxx" in left_out and len(left_out) == 2000
    assert {(row, what) for row, what, *_ in counted} == {(FAILS, "dropped"), (FAILS_AT_TIMES, "left out")}
    notes = [note for report in reports for note in report.notes]
    assert any("KeyError: 'plum'" in note and f"row {FAILS} of {config.task.path}" in note for note in notes)

    assert main(["export-trajectories", str(config.run_dir), str(config.run_dir / "out.parquet")]) == 0
    exported = pq.read_table(config.run_dir / "out.parquet").to_pylist()
    assert {row["group_id"]: row["data_row"] for row in exported}.items() <= rows.items()
    assert {row["data_row"] for row in exported if row["left_out"]} == {FAILS_AT_TIMES}
    assert {error for row in exported for error in row["left_out"]} == {left_out}
