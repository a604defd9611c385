"""benchmarks/run_audit.py finds what is wrong in a run of a few groups."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.run_dir.run_dir import write_config
from benchmarks.run_audit import audit
from buffer.client import WorkerClient
from buffer.journal import FILE_NAME
from tests.kit.buffer.clients import learner_at, put_all, with_worker
from tests.kit.buffer.journal import journalled
from tests.kit.buffer.serving import serving
from tests.kit.groups import make_group

REST = 2
"""The groups of rollout/1 when it is lost."""


async def put_six(worker: WorkerClient) -> None:
    for slot in await worker.admit(6):
        assert await worker.put(make_group(slot, worker="rollout/0"))


def run_that_loses_a_worker(folder: Path, is_granted_again: bool) -> Config:
    """The directory of a run of one step of four groups. Its eight slots are those of rollout/0 but for REST."""
    config = journalled(folder, placement={"rollout": {"servers": 2}})
    with serving(config) as server, learner_at(server) as learner:
        server.abandon("rollout/1", 1)
        with_worker(server.address, put_six)
        with_worker(server.address, lambda worker: worker.admit(REST), "rollout/1")
        assert server.abandon("rollout/1", 2) == REST
        if is_granted_again:
            with_worker(server.address, put_all)
        learner.take(0)
        learner.trained(1)
    (config.run_dir / "summary.json").write_text(json.dumps({"buffer": server.counters()}))
    write_config(config)
    log_pushes(config, {1: ["rollout/0"]}, fills=[1])  # both joined at version 0
    return config


def log_pushes(config: Config, pushes: dict[int, Iterable[str]], fills: Iterable[int] = ()) -> None:
    """Write metrics.jsonl of a run with a push at each version to some servers."""
    lines: list[dict[str, Any]] = [
        {"step": version, **{f"version/{name}": version for name in names}} for version, names in pushes.items()
    ]
    lines = [line | ({"push/filled_servers": 1} if line["step"] in fills else {}) for line in lines]
    (config.run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def change(config: Config, statement: str) -> None:
    with closing(sqlite3.connect(config.run_dir / FILE_NAME)) as journal, journal:
        journal.execute(statement)


def wrong(config: Config) -> dict[str, str]:
    return {check: problem for check, problem in audit(config.run_dir).items() if problem}


@pytest.mark.parametrize("is_granted_again", [True, False])
def test_prompts_of_lost_groups_are_granted_again_or_wait_for_it(is_granted_again: bool, tmp_path: Path) -> None:
    config = run_that_loses_a_worker(tmp_path, is_granted_again)
    assert wrong(config) == {}
    if is_granted_again:  # two other prompts in their place
        change(config, "UPDATE groups SET prompt_index = prompt_index + 100 WHERE group_id > 7")
    else:
        change(config, "UPDATE state SET scalars = json_set(scalars, '$.requeued', json('[]'))")
    assert wrong(config) == {"prompts of lost groups are granted again": str(REST)}


def test_groups_that_a_resume_has_lost_are_granted_again_too(tmp_path: Path) -> None:
    """Their workers are not known: a checkpoint has no workers."""
    config = run_that_loses_a_worker(tmp_path, True)
    change(config, "UPDATE groups SET worker = '', error = '' WHERE state = 'dropped' AND worker = 'rollout/1'")
    assert wrong(config) == {}
    change(config, "UPDATE groups SET prompt_index = prompt_index + 100 WHERE group_id = 8")
    assert wrong(config) == {"prompts of lost groups are granted again": "1"}


def test_a_worker_that_comes_back_has_no_group_of_the_time_between(tmp_path: Path) -> None:
    """rollout/1 gets the pushes 1, 2 and 6 to 8. At 4 another server joins."""
    config = run_that_loses_a_worker(tmp_path, False)
    zero, one = ["rollout/0"], ["rollout/0", "rollout/1"]
    pushes = {version: one if version in (1, 2, 6, 7, 8) else zero for version in range(1, 10)}
    log_pushes(config, pushes, fills=[4])
    right = {}
    for version in range(12):
        change(config, f"UPDATE groups SET start_version = {version} WHERE worker = 'rollout/1'")
        right[version] = wrong(config) == {}
    in_windows, at_the_fill = {0, 1, 2, 3, 5, 6, 7, 8, 9}, {3, 4}
    assert {version for version, is_right in right.items() if is_right} == in_windows | at_the_fill
    log_pushes(config, pushes)
    change(config, "UPDATE groups SET start_version = 4 WHERE worker = 'rollout/1'")
    assert wrong(config) == {"rollout/1 has groups of its time alone": "version 4 "}
