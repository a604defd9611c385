"""The end of a run after the first Ctrl-C or SIGTERM, or by a program. Processes are fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl import pipeline
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.placement import Host, host_demands
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import RunControl, StopSignals
from async_rl.run.processes.supervisor import EndedError, Supervisor
from tests.kit.configs import make_config


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_run_is_given_up_only_if_a_rank_still_runs(is_late: bool, tmp_path: Path) -> None:
    """After the checkpoint the driver may still wait for the servers' last reports, and a rank for servers to answer.
    """
    config = make_config(run={"dir": tmp_path}, timeouts={"interrupt_s": 0.01})
    log = RunLog(config)

    def stop() -> None:
        if not is_late:
            asyncio.get_running_loop().call_soon(supervisor._learning.clear)

    processes: Any = SimpleNamespace(actors={"learner/0": SimpleNamespace(stop=SimpleNamespace(remote=stop))})
    supervisor = Supervisor(config, processes, log)
    supervisor._learning, supervisor._is_training = {"learner/0"}, True

    async def end() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await supervisor._end_on(stopping)

    if is_late:
        with pytest.raises(EndedError, match=r"timeouts\.interrupt_s"):
            asyncio.run(end())
    else:
        asyncio.run(end())
    log.close()


def test_an_interrupt_before_the_learner_has_started_ends_the_run_at_once(tmp_path: Path) -> None:
    """There is no step that could end with a checkpoint. An engine may take minutes to start."""
    log = RunLog(config := make_config(run={"dir": tmp_path}, timeouts={"interrupt_s": 600}))
    supervisor = Supervisor(config, SimpleNamespace(actors={}), log)  # type: ignore[arg-type]

    async def end() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await supervisor._end_on(stopping)

    with pytest.raises(EndedError):
        asyncio.run(end())
    log.close()


class Stopped(Exception):
    """Ends a run when its learner has started."""


def test_the_end_that_a_program_asks_for_before_the_learner_has_started_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's process exists before that, but would lose the request."""
    happened: list[str] = []
    learner = SimpleNamespace(end=SimpleNamespace(remote=happened.append))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start_processes(config: Any, processes: Any, *_: Any) -> tuple[str, tuple[str, int]]:
        processes.actors["learner/0"] = learner
        return "tcp://buffer", ("h", 1)

    async def start_learner(*_: Any) -> None:
        happened.append("the learner has started")

    class ShortSupervisor(Supervisor):
        def train(self, address: str, revive: Any, start: Callable[[str], Awaitable[None]], signals: Any) -> None:
            async def go() -> None:
                await start("rollout/0")

            asyncio.run(go())
            raise Stopped

        def give_up(self, error: BaseException) -> None: ...

    for name in ("open_ray", "ray_messages_in"):
        monkeypatch.setattr(pipeline, name, lambda *_: contextlib.nullcontext())
    host = Host(name="h", cpus=8.0, gpus=0.0)
    monkeypatch.setattr(pipeline, "reserve", lambda config, _: Reservation(config, host_demands(config), [host]))
    monkeypatch.setattr(pipeline, "start_processes", start_processes)
    monkeypatch.setattr(pipeline, "start_learner", start_learner)
    monkeypatch.setattr("async_rl.run.processes.supervisor.Supervisor", ShortSupervisor)
    monkeypatch.setattr("async_rl.run.processes.actor_group.ActorGroup.stop", lambda *_: None)
    control = RunControl()
    control.end("a program is done")
    (config := make_config(run={"name": "r", "dir": tmp_path}, logging={"wandb": "disabled"})).run_dir.mkdir()
    with pytest.raises(Stopped):
        pipeline.train_once(config, {}, StopSignals(), (), control)
    assert happened == ["the learner has started", "a program is done"]
