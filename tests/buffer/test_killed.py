"""A buffer in a process of its own is killed with SIGKILL while learner and workers go on."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import random
import sqlite3
import threading
from pathlib import Path

import pytest

from async_rl.base.config import BufferConfig, Config, NetworkConfig, RunConfig, TimeoutsConfig
from buffer.journal import FILE_NAME
from buffer.server import BufferServer
from tests.kit.buffer.clients import run_pipeline
from tests.kit.configs import buffer_config

pytestmark = pytest.mark.processes

STEPS = 60


def serve(config: Config, ready: threading.Event) -> None:
    server = BufferServer(config)
    ready.set()
    server.serve(threading.Event())


def buffer_that_is_killed(config: Config, kills: int, rng: random.Random, done: threading.Event) -> None:
    """Kill the buffer again and again; it is started again at once, with the same config."""
    spawned = multiprocessing.get_context("spawn")
    for life in range(kills + 1):
        ready = spawned.Event()
        buffer = spawned.Process(target=serve, args=(config, ready), daemon=True)
        buffer.start()
        assert ready.wait(30)
        done.wait(None if life == kills else rng.uniform(0.1, 1.5))
        buffer.kill()
        buffer.join(10)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_killed_buffer_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.5)
    monkeypatch.setattr("buffer.client.ATTEMPTS", 20)
    port = 61000 + random.randrange(4000)
    config = dataclasses.replace(
        buffer_config(max_staleness=2, workers=2),
        timeouts=TimeoutsConfig(buffer_s=20.0, batch_s=60.0),
        run=RunConfig(name="killed", dir=str(tmp_path)),
        network=NetworkConfig(port=port),
        buffer=BufferConfig(journal=True),
    )
    steps = STEPS * max(1, kills // 4)
    done = threading.Event()
    killing = threading.Thread(target=buffer_that_is_killed, args=(config, kills, random.Random(kills), done))
    killing.start()
    try:
        batches = run_pipeline(f"tcp://127.0.0.1:{port}", config, steps, workers=2, step_s=0.05)
    finally:
        done.set()
        killing.join(60)
    trained = [group.group_id for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 4 * steps
    assert max(batch.version - group.oldest_version for batch in batches for group in batch.groups) <= 2
    with contextlib.closing(sqlite3.connect(tmp_path / "killed" / FILE_NAME)) as database:
        uses = database.execute("SELECT version, group_id FROM uses ORDER BY version, group_id").fetchall()
        assert uses == [(batch.version, group.group_id) for batch in batches for group in batch.groups]
        states = dict(database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        assert states["trained"] == len(trained)
        highest = database.execute("SELECT MAX(group_id) FROM groups").fetchone()[0]
        assert sum(states.values()) == highest + 1, "every group that was ever admitted is accounted for"
