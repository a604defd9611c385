"""Processes that do not answer: after which silence they count as dead."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from async_rl.base.errors import ProcessKilledError
from async_rl.base.telemetry.status import Status
from async_rl.run.processes import watchdog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.lives import Lives
from async_rl.run.processes.watchdog import Watchdog
from tests.kit.configs import make_config

pytestmark = pytest.mark.anyio


class Processes:
    """A process that answers once `answers` is true."""

    def __init__(self, name: str = "rollout/0") -> None:
        self.answers, self.starts = False, Counter({name: 1})
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


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watchdog]:
    """Makes a watchdog that looks often."""
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.01)

    def made(processes: Processes, **timeouts: float) -> Watchdog:
        config = make_config(run={"name": "r", "dir": tmp_path}, timeouts=timeouts)
        config.run_dir.mkdir()
        return Watchdog(config, cast(ActorGroup, processes))

    return made


@pytest.mark.parametrize("is_up", [True, False])
async def test_silence_counts_from_the_first_answer_of_a_process_that_starts(
    is_up: bool, watch: Callable[..., Watchdog]
) -> None:
    """One whose engine still starts is not dead: its start has timeouts.startup_s."""
    processes = Processes()
    watching = watch(processes, silent_s=1e-3)
    watching.begin("rollout/0", is_up)

    async def found(looks: int = 3) -> list[str]:
        return [name for _ in range(looks) for name, _ in await watching.look()]

    assert bool(await found()) == is_up
    watching.forget("rollout/0")
    watching.begin("rollout/0", is_up)
    processes.answers = True
    assert await found(1) == []
    processes.answers = False
    assert "rollout/0" in await found()


@pytest.mark.parametrize(("silent_s", "buffer_s", "setting"), [
    (1e-3, 60, "timeouts.silent_s"), (60, 3e-3, "timeouts.buffer_s"),
])
async def test_a_buffer_with_a_journal_may_be_silent_for_a_third_of_its_own_limit(
    silent_s: float, buffer_s: float, setting: str, watch: Callable[..., Watchdog]
) -> None:
    watching = watch(Processes("buffer"), silent_s=silent_s, buffer_s=buffer_s)
    watching.begin("buffer")
    assert await watching.look() == []
    ((name, error),) = await watching.look()
    assert name == "buffer" and isinstance(error, ProcessKilledError) and setting in str(error)


async def test_the_end_of_a_run_is_not_the_loss_of_a_process_that_is_lost_meanwhile() -> None:
    lives = Lives()
    following = asyncio.create_task(lives.follow("rollout/0", asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    lives.declare_lost("rollout/0", ProcessKilledError("gone"))
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
