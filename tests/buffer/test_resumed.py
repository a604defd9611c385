"""A run that ends after its checkpoint, and the buffer and journal of the runs that resume from it."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, WireError
from async_rl.base.run_dir.run_dir import write_config
from async_rl.base.types import Group, Slot, Support
from buffer.client import LearnerClient, WorkerClient
from buffer.journal import FILE_NAME, Journal
from buffer.past_journal import import_past
from buffer.server import BufferServer
from buffer.wire import pack_request
from tests.kit.buffer.clients import TIMEOUTS, ask, learner_at, with_worker
from tests.kit.buffer.journal import exported, journalled, select
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import changed, opened_run
from tests.kit.groups import assert_same, make_group, make_row
from tests.kit.routing import tiny_experts
from tests.kit.runs import make_checkpoint, training_state


def run_past_its_checkpoint(config: Config) -> Config:
    """Batch 0 is trained; the checkpoint; batch 1 is trained, too; a crash. Groups 0..3 are of version 0, 4 and 5 of 1.

    Returns the config of a run that resumes from it.
    """
    with serving_until_a_crash(config) as server, learner_at(server) as learner:

        async def finish(worker: WorkerClient) -> None:
            await worker.admit(4)
            for group_id in (0, 1, 2):
                await worker.put(make_group(Slot(group_id=group_id, prompt_index=group_id, start_version=0)))

        async def finish_later(worker: WorkerClient) -> None:
            await worker.admit(2)  # groups 4 and 5, at version 1
            slot = Slot(group_id=3, prompt_index=3, start_version=0)
            await worker.put(make_group(slot, rows=(make_row(2, versions=np.array([0, 1], np.int32)),) * 2))

        async def finish_last(worker: WorkerClient) -> None:
            slot = Slot(group_id=4, prompt_index=4, start_version=1)
            await worker.put(make_group(slot, rows=(make_row(2, versions=np.array([1, 2], np.int32)),) * 2))

        with_worker(server.address, finish)
        learner.take(0)
        learner.trained(1)
        learner.served(1)
        with_worker(server.address, finish_later)
        plain = learner.buffer_checkpoint(1)
        learner.take(1)  # groups 2 and 3
        learner.trained(2)
        with_worker(server.address, finish_last)
    make_checkpoint(config.run_dir, 1, buffer=plain)
    return changed(config, run={"resume": config.run_dir})


def test_a_resumed_buffer_keeps_arrived_groups_but_not_those_of_lost_versions(tmp_path: Path) -> None:
    again = run_past_its_checkpoint(journalled(tmp_path, prompts_per_step=2))  # 4 slots
    past = []
    for _ in range(2):  # the second resume follows one that made no checkpoint
        with opened_run(again) as resumed, serving(resumed) as server:
            counters = server.counters()
            assert counters["buffer/depth"] == 2, "groups 2 and 3 arrived whole, and all their tokens can be trained on"
            dropped = [counters[f"buffer/dropped_{reason}"] for reason in ("future_version", "failed")]
            assert sum(dropped) == 2, "group 4 has a token of version 2, group 5 never arrived"
            past.append(dropped)
    assert past == [[1, 1], [1, 1]], "the outcome of group 4 is known after every resume"
    with opened_run(again) as resumed, serving(resumed) as server, learner_at(server, 1) as learner:
        assert [group.group_id for group in learner.take(1).groups] == [2, 3]
        learner.trained(2)
        admit = pack_request("admit", 7, worker="rollout/0", incarnation=1, max_groups=2, wait_s=1.0)
        slots = ask(server.address, [admit])
        assert [slot[1] for slot in slots["result"]["slots"]] == [4, 5], "their prompts are granted again"


def test_the_journal_of_a_resumed_run_holds_every_group_once(tmp_path: Path) -> None:
    config = journalled(tmp_path, prompts_per_step=2)
    again = run_past_its_checkpoint(config)
    for number in (1, 2):
        with opened_run(again) as resumed, serving(resumed) as server, learner_at(server, 1) as learner:
            assert [group.group_id for group in learner.take(1).groups] == [2, 3]
            learner.trained(2)
            write_config(resumed)  # the first step of the resume has been logged
        past_files = sorted(file.name for file in config.run_dir.glob("*.lineage_*.sqlite"))
        past = [f"trajectories.lineage_{i}.sqlite" for i in range(number)]
        assert past_files == past, "a resume has overwritten the files of another"
    assert select(config, "SELECT group_id, step, staleness, response_tokens FROM trained WHERE row = 0") == [
        (0, 1, 0, 3), (1, 1, 0, 3), (2, 2, 1, 3), (3, 2, 1, 2),
    ]
    ids = [group_id for (group_id,) in select(config, "SELECT group_id FROM groups ORDER BY group_id")]
    assert ids == list(range(len(ids))), "every group ever admitted"
    rows = exported(config)
    steps = {(row["group_id"], row["row"]): row["trained_steps"] for row in rows}
    assert steps == {(group_id, i): [1 + group_id // 2] for group_id in range(4) for i in range(2)}
    assert all(row["tokens"] for row in rows)


def test_groups_from_before_a_resume_with_other_sizes_are_exported(tmp_path: Path) -> None:
    again = run_past_its_checkpoint(journalled(tmp_path, prompts_per_step=2))  # two answers of three tokens a group
    rollout = dataclasses.replace(again.rollout, group_size=4, max_response_tokens=1)
    with opened_run(dataclasses.replace(again, rollout=rollout)) as resumed, serving(resumed) as server:
        assert server.counters()["buffer/depth"] == 0, "groups 2 and 3 are not of the new sizes"
        write_config(resumed)  # the first step of the resume has been logged
    rows = [row for row in exported(resumed) if row["state"] == "trained"]
    assert len(rows) == 4 and all(len(row["tokens"]) == row["response_tokens"] > 1 for row in rows)


def test_groups_sampled_from_averaged_weights_are_made_again_after_a_resume(tmp_path: Path) -> None:
    """The run's last push has the average of the weights, as version 1: a longer run must not take them for that."""
    config = journalled(tmp_path, prompts_per_step=2)

    def is_stored(server: BufferServer, group_id: int) -> bool:
        slot = Slot(group_id=group_id, prompt_index=group_id, start_version=0)
        group = make_group(slot, rows=(make_row(2, versions=np.array([0, 1], np.int32)),) * 2)
        return with_worker(server.address, lambda worker: worker.put(group))

    with serving_until_a_crash(config) as server, learner_at(server) as learner:
        slots = with_worker(server.address, lambda worker: worker.admit(4))
        for slot in slots[:2]:
            with_worker(server.address, lambda worker, slot=slot: worker.put(make_group(slot)))
        learner.take(0)
        learner.trained(1)
        assert is_stored(server, 2), "it has tokens of the weights themselves, from before the last push"
        learner.ended(1)
        plain = learner.buffer_checkpoint(1)
    with serving_until_a_crash(config) as server:  # another buffer remembers it
        assert not is_stored(server, 3)
    make_checkpoint(config.run_dir, 1, buffer=plain)
    again = changed(config, run={"resume": config.run_dir})
    with opened_run(again) as resumed, serving(resumed) as server, learner_at(server, 1) as learner:
        counters = server.counters()
        assert (counters["buffer/depth"], counters["buffer/dropped_failed"]) == (1, 1), "groups 2 and 3"
        granted = with_worker(server.address, lambda worker: worker.admit(1))
        assert [slot.prompt_index for slot in granted] == [3], "its prompt is granted again"


def with_support(group: Group) -> Group:
    """The group, each of whose tokens was drawn from itself alone."""
    rows = (dataclasses.replace(row, support=Support.of([[token] for token in row.tokens])) for row in group.rows)
    return dataclasses.replace(group, rows=tuple(rows))


def with_experts(group: Group) -> Group:
    """The group, each of whose tokens used the experts 0 and 1 of the first layer, and 2 and 3 of the second."""
    fed = [len(group.prompt_tokens) + len(row.tokens) - 1 for row in group.rows]
    experts = [np.tile(np.arange(4, dtype=np.uint8).reshape(2, 2), (tokens, 1, 1)) for tokens in fed]
    rows = (dataclasses.replace(row, routing=used) for row, used in zip(group.rows, experts, strict=True))
    return dataclasses.replace(group, rows=tuple(rows))


@pytest.mark.parametrize(("sections", "lacking", "complete"), [
    ({"algorithm": {"advantage": "remax"}}, "baseline_reward",
     lambda slot: make_group(slot, baseline_reward=0.5)),
    ({"rollout": {"top_p": 0.9}}, "support", lambda slot: with_support(make_group(slot))),
    ({}, "routing", lambda slot: with_experts(make_group(slot))),
], ids=["remax", "supports", "experts"])
def test_groups_from_before_a_resume_that_lack_what_it_needs_are_made_again(
    sections: dict[str, Any], lacking: str, complete: Callable[[Slot], Group], tmp_path: Path
) -> None:
    if lacking == "routing":
        tiny_experts("Qwen3Moe").save_pretrained(tmp_path / "experts")
        sections = {"model": {"path": tmp_path / "experts"}}
    again = changed(run_past_its_checkpoint(journalled(tmp_path, prompts_per_step=2)), **sections)
    with opened_run(again) as resumed, serving(resumed) as server:
        counters = server.counters()
        assert (counters["buffer/depth"], counters["buffer/dropped_failed"], counters["buffer/requeued"]) == (0, 4, 4)
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(1)

        async def make_again(worker: WorkerClient) -> list[int]:
            slots = await worker.admit(4)
            with pytest.raises(WireError, match=f"{lacking}: got None"):
                await worker.put(make_group(slots[0]))
            for slot in slots:
                await worker.put(complete(slot))
            return [slot.prompt_index for slot in slots]

        assert with_worker(server.address, make_again) == [2, 3, 4, 5]
        for group in learner.take(1).groups:
            slot = Slot(group_id=group.group_id, prompt_index=group.prompt_index, start_version=group.start_version)
            assert_same(group, complete(slot))
        learner.close()


SAVED = training_state(1, buffer={"scalars": {"next_group_id": 9}, "live": []})


def test_a_damaged_journal_of_the_past_is_an_error(tmp_path: Path) -> None:
    config = journalled(tmp_path, prompts_per_step=2)
    run_past_its_checkpoint(config)
    past = config.run_dir / FILE_NAME
    with contextlib.closing(sqlite3.connect(past)) as database:
        database.execute("DROP TABLE payloads")
    journal = Journal(tmp_path / "new.sqlite", keep_steps=-1)
    with pytest.raises(AsyncRLError, match=str(past)):
        import_past(journal, past, SAVED)


def test_without_a_journal_of_the_past_a_resume_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new.sqlite", keep_steps=-1)
    (tmp_path / "broken.sqlite").write_bytes(b"not a database" * 100)
    Journal(tmp_path / "empty.sqlite", keep_steps=-1).close()
    for name in ("broken.sqlite", "empty.sqlite", "absent.sqlite"):
        import_past(journal, tmp_path / name, SAVED)
    journal.close()
    assert not (tmp_path / "absent.sqlite").exists()
