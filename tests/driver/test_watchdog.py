"""Processes that do not answer: after which silence they count as dead."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from async_rl.base.errors import ProcessKilledError
from async_rl.base.telemetry.status import Status
from async_rl.run.processes import watchdog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.watchdog import Watchdog
from tests.kit.configs import make_config


class Processes:
    """A process that answers once `answers` is true."""

    def __init__(self, name: str = "rollout/0") -> None:
        self.answers = False
        self.actors = {name: SimpleNamespace(status=SimpleNamespace(remote=self._status))}

    async def _status(self) -> Status:
        if not self.answers:
            await asyncio.Event().wait()
        return Status(doing="generates", since_s=0.0)

    async def dump_stacks(self) -> None: ...

    def place(self, name: str, status: Status) -> Status:
        return status

    def on_host(self, name: str) -> str:
        return f"{name} on a host"

    def log_tail(self, name: str) -> str:
        return ""


@pytest.mark.parametrize("is_up", [True, False])
def test_silence_counts_from_the_first_answer_of_a_process_that_starts(
    is_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose engine still starts is not dead: its start has timeouts.startup_s."""
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.01)
    config = make_config(run={"name": "r", "dir": tmp_path}, timeouts={"silent_s": 1e-3})
    config.run_dir.mkdir()
    processes = Processes()
    watching = Watchdog(config, cast(ActorGroup, processes))
    watching.begin("rollout/0", is_up)

    async def found(looks: int = 3) -> list[str]:
        return [str(error) for _ in range(looks) for _, error in await watching.look()]

    async def look() -> tuple[list[str], list[str]]:
        before = await found()
        watching.forget("rollout/0")
        watching.begin("rollout/0", is_up)
        processes.answers = True
        assert await found(1) == []
        processes.answers = False
        return before, await found()

    before, after = asyncio.run(look())
    assert bool(before) == is_up
    assert after and all("rollout/0 on a host has given no sign of life" in each for each in after)


@pytest.mark.parametrize(("silent_s", "buffer_s", "setting"), [
    (1e-3, 60, "timeouts.silent_s"), (60, 3e-3, "timeouts.buffer_s"),
])
def test_a_buffer_with_a_journal_may_be_silent_for_a_third_of_its_own_limit(
    silent_s: float, buffer_s: float, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.01)
    config = make_config(run={"name": "r", "dir": tmp_path}, timeouts={"silent_s": silent_s, "buffer_s": buffer_s})
    config.run_dir.mkdir()
    watching = Watchdog(config, cast(ActorGroup, Processes("buffer")))
    watching.begin("buffer")

    async def look() -> None:
        assert await watching.look() == []
        ((name, error),) = await watching.look()
        assert name == "buffer" and isinstance(error, ProcessKilledError) and setting in str(error)

    asyncio.run(look())
