"""Runs of fake processes: of Ray actors with the real supervisor, and of servers with the real server pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from async_rl.base.config import TimeoutsConfig
from async_rl.base.run_dir.run_dir import locked

if TYPE_CHECKING:
    from tests.kit.fake_actors import FakeRun
    from tests.kit.fake_servers import FakeServers


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeRun]]:
    """Starts the buffer and the learner of a run, whose directory is locked. `FakeRun.train` supervises it."""
    from async_rl.run.processes import server_pool, watchdog
    from tests.kit.fake_actors import FakeRun, Rollout

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_pool, "server_class", lambda _: Rollout)
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.2)
    monkeypatch.setattr(server_pool, "LOOK_INTERVAL_S", 0.1)
    monkeypatch.setattr(server_pool, "RETRY_S", 0.2)
    runs: list[FakeRun] = []
    with ExitStack() as locks:

        def start(
            servers: int = 1, ranks: int = 1, colocated: bool = False, silent_s: float = 60, **more_s: float
        ) -> FakeRun:
            timeouts = TimeoutsConfig(silent_s=silent_s, **more_s)
            run = FakeRun(tmp_path, servers, ranks, timeouts, colocated)
            locks.enter_context(locked(run.config.run_dir))
            runs.append(run)
            return run

        yield start
        for run in runs:
            run.processes.stop(1.0)
            run.log.close()


@pytest.fixture
def open_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServers]:
    """Makes the servers of a run, which looks often at requests and hosts."""
    from async_rl.run.processes import server_pool
    from tests.kit.fake_servers import FakeServers

    monkeypatch.setattr(server_pool, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(server_pool, "DRAIN_INTERVAL_S", 0.01)
    monkeypatch.setattr(server_pool, "RETRY_S", 0.01)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return lambda *arguments, **settings: FakeServers(tmp_path, *arguments, **settings)
