"""The journal on a real file: the state of a buffer after a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from pathlib import Path

import pytest

from async_rl.base.config import Config, ModelConfig, RunConfig, TaskConfig
from async_rl.base.config.loading import dump_config
from async_rl.base.errors import AsyncRLError
from async_rl.base.types import Batch, Group, Slot
from async_rl.cli import main
from buffer.client import LearnerClient, WorkerClient
from buffer.journal import FILE_NAME, SCHEMA_VERSION, Journal
from buffer.wire import pack_request
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import open_task
from tests.kit.buffer.clients import TIMEOUTS, ask, run_pipeline, with_worker
from tests.kit.buffer.journal import exported, journalled, same_port, select
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import changed
from tests.kit.documents import documented_queries
from tests.kit.groups import make_group, make_row


async def put_six(worker: WorkerClient) -> None:
    for slot in (await worker.admit(8))[:6]:
        assert await worker.put(make_group(slot))


def test_a_buffer_that_crashed_continues_where_it_was_with_its_clients(tmp_path: Path) -> None:
    config = journalled(tmp_path)
    learner = None
    try:
        with serving_until_a_crash(config) as server:
            learner = LearnerClient(server.address, TIMEOUTS)
            learner.served(0)
            with_worker(server.address, put_six)
            first = learner.take(0)
            before = server.counters()
        with serving(same_port(config, server)) as server:
            assert server.counters() == {**before, "buffer/restarts": 1}
            again = learner.take(0)
            assert [group.group_id for group in again.groups] == [group.group_id for group in first.groups]
            assert again.finished_versions == first.finished_versions

            async def put_the_rest(worker: WorkerClient) -> list[bool]:
                slots = [Slot(group_id=i, prompt_index=i, start_version=0) for i in (5, 6, 7)]
                return [await worker.put(make_group(slot)) for slot in slots]

            assert with_worker(server.address, put_the_rest) == [False, True, True]
            learner.trained(1)
            learner.trained(1)  # as a client that missed the answer does
            learner.served(1)
            assert [group.group_id for group in learner.take(1).groups] == [4, 5, 6, 7]
            assert server.counters()["buffer/slots_held"] == 4
    finally:
        if learner:
            learner.close()


def test_slots_whose_answer_was_lost_in_a_crash_are_granted_once(tmp_path: Path) -> None:
    config = journalled(tmp_path)
    request = [pack_request("admit", 77, worker="rollout/0", incarnation=1, max_groups=3, wait_s=1.0)]
    with serving_until_a_crash(config) as server:
        ask(server.address, [pack_request("served", 1, version=0)])
        lost = ask(server.address, request)
    with serving(config) as server:
        assert ask(server.address, request) == lost
        assert server.counters()["buffer/admitted"] == 3


def test_a_request_is_answered_after_its_effect_is_committed(tmp_path: Path) -> None:
    config = journalled(tmp_path)
    seen = []

    async def put_one(worker: WorkerClient) -> None:
        slot = (await worker.admit(1))[0]
        seen.append(select(config, "SELECT group_id, state FROM groups"))
        await worker.put(make_group(slot))
        arrived = "SELECT group_id, state, bytes > 0 FROM groups JOIN payloads USING (group_id)"
        seen.append(select(config, arrived))

    with serving(config) as server:
        ask(server.address, [pack_request("served", 1, version=0)])
        with_worker(server.address, put_one)
    assert seen == [[(0, "running")], [(0, "finished", 1)]]
    assert select(config, "SELECT state, drop_reason FROM groups") == [("dropped", "shutdown")]


def trained(config: Config, steps: int = 12) -> list[Batch]:
    with serving(config) as server:
        return run_pipeline(server, config, steps, workers=1)


def test_payloads_of_trained_groups_are_pruned_and_nothing_else_is(tmp_path: Path) -> None:
    config = journalled(tmp_path, keep_steps=2)
    batches = trained(config)
    kept = {group_id for (group_id,) in select(config, "SELECT group_id FROM payloads")}
    of_last_two = {group.group_id for batch in batches[-2:] for group in batch.groups}
    assert kept & {group.group_id for batch in batches for group in batch.groups} == of_last_two
    assert select(config, "SELECT COUNT(*) FROM rows")[0][0] >= 12 * 4 * 2
    everything = journalled(tmp_path / "all", keep_steps=-1)
    batches = trained(everything)
    assert select(everything, "SELECT COUNT(*) FROM payloads")[0][0] >= 12 * 4
    assert sorted(select(everything, "SELECT version, group_id FROM uses")) == sorted(
        (batch.version, group.group_id) for batch in batches for group in batch.groups
    )


def test_payloads_are_kept_until_the_checkpoint_after_theirs_is_complete(tmp_path: Path) -> None:
    """Checkpoint 4 is being written until 8 is due at the latest; a crash before that resumes from 0."""
    config = changed(journalled(tmp_path, keep_steps=0), checkpoint={"every_steps": 4})
    kept_at_the_end = []
    for steps in (8, 9):
        fresh = dataclasses.replace(config, run=RunConfig(name=f"{steps}", dir=str(tmp_path)))
        batches = trained(fresh, steps=steps)
        kept = {group_id for (group_id,) in select(fresh, "SELECT group_id FROM payloads")}
        kept_at_the_end.append({group.group_id for group in batches[0].groups} <= kept)
    assert kept_at_the_end == [True, False]


def test_the_queries_in_the_documents_run(tmp_path: Path) -> None:
    config = journalled(tmp_path)
    batches = trained(config)
    worst, *others = (select(config, query) for query in documented_queries())
    assert others and worst == [
        (batch.version + 1, max(batch.version - group.oldest_version for group in batch.groups)) for batch in batches
    ]


def test_rewards_are_told_by_name_in_the_journal_and_in_its_export(tmp_path: Path) -> None:
    def named(slot: Slot, *_: object) -> Group:
        version = slot.start_version
        rows = [make_row(3, version=version, rewards={"right": float(n), "judge/sure": 0.5}) for n in (0, 1)]
        return make_group(slot, rows=rows)

    config = journalled(tmp_path)
    with serving(config) as server:
        run_pipeline(server, config, 2, workers=1, make=named)
    _, _, by_name, *_ = (select(config, query) for query in documented_queries())
    assert {(name, mean) for name, _, _, mean in by_name} == {("right", 0.5), ("judge/sure", 0.5)}
    rewards = [json.loads(row["rewards"]) for row in exported(config)]
    assert rewards[:2] == [{"right": 0.0, "judge/sure": 0.5}, {"right": 1.0, "judge/sure": 0.5}]


def test_trajectories_are_exported_with_tokens_where_the_journal_has_them(tmp_path: Path) -> None:
    config = journalled(tmp_path, keep_steps=3)
    batches = trained(config)
    rows = exported(config)
    assert len(rows) == select(config, "SELECT COUNT(*) FROM rows")[0][0]
    by_id = {(record["group_id"], record["row"]): record for record in rows}
    for batch in batches:
        for group in batch.groups:
            for i, row in enumerate(group.rows):
                record = by_id[group.group_id, i]
                assert record["trained_steps"] == [batch.version + 1] and record["state"] == "trained"
                assert record["staleness"] == batch.version - row.versions[0] and record["reward"] == 0.5
                is_kept = batch.version >= 12 - 3
                assert record["tokens"] == (row.tokens.tolist() if is_kept else None)
                assert record["versions"] == (row.versions.tolist() if is_kept else None)


def test_an_export_has_texts_and_ground_truth_if_asked(tmp_path: Path) -> None:
    config = journalled(tmp_path, keep_steps=3)
    task_config = TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=256)
    config = dataclasses.replace(config, model=ModelConfig(path=str(tmp_path / "model")), task=task_config)
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    task = open_task(config, tokenizer)
    prompts = {index: task.prompt(index) for index in range(200)}

    def answered(slot: Slot, *_: object) -> Group:
        prompt = prompts[slot.prompt_index]
        return make_group(slot, prompt.tokens.tolist(), data_row=prompt.data_row)

    with serving(config) as server:
        run_pipeline(server, config, steps=12, workers=1, make=answered)
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    rows = exported(config, "--text")
    assert {record["tokens"] is None for record in rows} == {True, False}
    for record in rows:
        is_kept = record["tokens"] is not None
        assert record["prompt_text"] == (tokenizer.decode(record["prompt_tokens"]) if is_kept else None)
        assert record["response_text"] == (tokenizer.decode(record["tokens"]) if is_kept else None)
        assert record["ground_truth"] == prompts[record["prompt_index"]].question.ground_truth
    assert "response_text" not in exported(config)[0]


def test_a_run_without_a_journal_says_so_when_asked_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(journalled(tmp_path), buffer={"journal": False})
    trained(config, steps=2)
    assert not (config.run_dir / FILE_NAME).exists()
    assert main(["export-trajectories", str(config.run_dir), str(tmp_path / "out.parquet")]) == 2
    assert "buffer.journal" in capsys.readouterr().err


def test_a_journal_of_another_schema_version_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / FILE_NAME
    Journal(file, keep_steps=1).close()
    Journal(file, keep_steps=1).close()
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 0")
    said = f"{SCHEMA_VERSION}, got 0"
    with pytest.raises(AsyncRLError, match=said):
        Journal(file, keep_steps=1)
    assert main(["export-trajectories", str(tmp_path), str(tmp_path / "out.parquet")]) == 1
    assert said in capsys.readouterr().err
