"""Example examples: which are chosen, and the table that wandb gets, once by its own offline mode."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.base.telemetry.examples import COLUMNS, ExampleTable, choose_examples
from async_rl.base.telemetry.metrics_logger import MetricsLogger
from async_rl.base.telemetry.trackers import TABLE_EVERY_S, WandbRun
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import make_config
from tests.kit.learner.batches import make_batch


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer().save_pretrained(folder)
    return folder


def test_answers_are_chosen_from_groups_all_over_the_batch() -> None:
    chosen = choose_examples(make_batch(version=5, groups=10))
    assert [each.group_id for each in chosen] == [0, 3, 6, 9]
    assert {(each.step, each.number, each.staleness) for each in chosen} == {(6, 1, 0)}
    assert len(choose_examples(make_batch(groups=2))) == 2


def test_a_table_holds_the_rows_of_all_steps_since_the_last_one(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda columns, data: data))  # type: ignore[arg-type]
    run = WandbRun(
        SimpleNamespace(log=logged.append, finish=lambda: None), pytest.fail, ExampleTable(str(tokenizer_folder))
    )
    for step in range(4):
        now_s = 100.0 + step * TABLE_EVERY_S / 2
        run.log({"step": step + 1}, choose_examples(make_batch(version=step, groups=1)))
    run.log({"step": 0, "eval/accuracy": 0.5})
    run.close()
    tables = {record["step"]: [row[0] for row in record.get("examples", [])] for record in logged}
    assert tables == {1: [1], 2: [], 3: [2, 3], 4: [4], 0: []}


@pytest.mark.nightly
@pytest.mark.processes
def test_wandb_itself_writes_the_table_when_it_is_offline(tokenizer_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = make_config(tokenizer_folder, run={"steps": 2}, logging={"wandb": "offline"})  # fmt: skip
    logger = MetricsLogger(config, tmp_path)
    for step in range(2):
        logger.log(step + 1, {"reward/mean": 0.5}, choose_examples(make_batch(version=step)))
    logger.close()
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-*/files/media/table/*.json")]
    assert len(tables) == 2
    assert all(tuple(table["columns"]) == COLUMNS for table in tables)
    assert sorted(row[0] for table in tables for row in table["data"]) == [1, 1, 1, 2, 2, 2]
