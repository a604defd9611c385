"""The driver starts another buffer in place of one that was killed, also if that one is killed while it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_rl.base.config import BufferConfig, TimeoutsConfig
from async_rl.base.errors import ProcessKilledError
from async_rl.pipeline import revive_buffer
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from tests.kit.configs import make_config

FIRST = ProcessKilledError("the buffer died")


class Buffers:
    """Stands in for the processes of a run, whose next buffers are killed while they start, as often as it says."""

    def __init__(self, kills: float) -> None:
        self.kills, self.ports, self.notes = kills, list[int](), list[str]()
        self.log = cast(RunLog, SimpleNamespace(logger=SimpleNamespace(note=self.notes.append)))

    def start(self, name: str, cls: type, *args: Any, max_concurrency: int) -> Any:
        self.ports.append(args[0])
        return SimpleNamespace(start=SimpleNamespace(remote=lambda: None))

    async def call(self, *args: Any) -> None:
        await asyncio.sleep(0.01)
        if len(self.ports) <= self.kills:
            raise ProcessKilledError(f"the buffer died again, the {len(self.ports)}. time")

    def revive(self, buffer_s: float = 600.0, journal: bool = True) -> None:
        config = make_config(
            Path("model"), timeouts=TimeoutsConfig(buffer_s=buffer_s), buffer=BufferConfig(journal=journal)
        )
        asyncio.run(revive_buffer(config, cast(ActorGroup, self), self.log, "tcp://127.0.0.1:5007", FIRST))


@pytest.mark.parametrize("kills", [0, 1, 4])
def test_a_buffer_that_is_killed_while_it_starts_is_replaced_too(kills: int) -> None:
    buffers = Buffers(kills)
    buffers.revive()
    assert buffers.ports == [5007] * (kills + 1)
    assert len(buffers.notes) == kills + 1


def test_a_buffer_killed_in_every_start_ends_the_run_once_its_clients_give_up() -> None:
    buffers = Buffers(kills=float("inf"))
    with pytest.raises(ProcessKilledError):
        buffers.revive(buffer_s=0.2)
    assert len(buffers.ports) > 2


def test_a_buffer_without_a_journal_is_not_replaced() -> None:
    buffers = Buffers(0)
    with pytest.raises(ProcessKilledError) as caught:
        buffers.revive(journal=False)
    assert caught.value is FIRST and not buffers.ports
