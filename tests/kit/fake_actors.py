"""Ray actors in place of the real processes of a run, and a run of such actors with the real supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import ray

from async_rl.base.config import TimeoutsConfig
from async_rl.base.errors import AsyncRLError, ProcessKilledError
from async_rl.base.messages.reports import (
    EvaluationDone,
    EvaluationDue,
    LearnerReport,
    ServersFilled,
    ServersLost,
    StepDone,
    WorkerReport,
)
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import Origin, learner_threads
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import StopSignals
from async_rl.run.processes.supervisor import ReviveBuffer, Supervisor, UntilUp
from tests.kit.configs import make_config

FILLED = 5
"""The policy version that every server is filled with."""


class FakeProcess:
    """A process that does what files in the working directory tell it to do."""

    def __init__(self, origin: Origin, index: int = 0) -> None:
        self._folder, self._index, self._config = Path(origin.folder), index, origin.config

    def told(self, what: str) -> bool:
        return (self._folder / f"{type(self).__name__.lower()}-{self._index}-{what}").exists()

    def tell(self, what: str) -> None:
        (self._folder / f"{type(self).__name__.lower()}-{self._index}-{what}").touch()

    def note(self, what: str) -> None:
        """Append a line to the list of what happened in all processes."""
        with (self._folder / "events").open("a") as events:
            events.write(f"{what}\n")

    def obey(self) -> None:
        if self.told("dies"):
            os._exit(9)
        if self.told("fails"):
            raise AsyncRLError(f"{self._index} lost its peer")

    def dump_stacks(self) -> None: ...

    def stop(self) -> None: ...


class Buffer(FakeProcess):
    def serve(self) -> None:
        while True:
            time.sleep(0.05)
            self.obey()

    def abandon(self, worker: str, incarnation: int) -> int:
        self.note(f"{worker} abandoned before start {incarnation}")
        return 3

    def status(self) -> Status:
        return Status(doing="answers", since_s=time.monotonic())


class Rollout(FakeProcess):
    """A rollout server."""

    def __init__(self, origin: Origin, index: int, url: str = "") -> None:
        super().__init__(origin, index)
        self._name = self._config.server_names[index]

    async def start(self) -> str:
        self.note(f"{self._name} started")
        return f"http://{self._name}"

    async def kv_tokens(self) -> int:
        if self.told("comes back"):
            return 1000
        self.tell("comes back")
        return 2000

    async def connect(self, address: str, judge_urls: Sequence[str], incarnation: int) -> None:
        self.note(f"{self._name} connected in start {incarnation}")

    async def run(self) -> AsyncIterator[WorkerReport]:
        start_s = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            self.obey()
            span = Span(self._name, "busy", start_s, time.monotonic())
            yield WorkerReport(spans=(span,))

    async def status(self) -> Status:
        return Status(doing="generates 7 groups", waits_on="its engine", since_s=time.monotonic())

    async def evaluate(
        self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)
    ) -> EvaluationDone:
        self.tell("evaluates")
        if self.told("hangs when asked"):
            (self._folder / f"rollout-{self._index}-hangs when asked").unlink()
            time.sleep(1000)
        while not self.told("answers"):
            await asyncio.sleep(0.02)
        return EvaluationDone(version=version, metrics=(Metric("eval/accuracy", 0.5), Metric("eval/version", version)))


class Learner(FakeProcess):
    """A learner rank. Its steps take 0.05 s, and it fills the servers that join after each of them."""

    def __init__(self, origin: Origin, rank: int) -> None:
        super().__init__(origin, rank)
        self._joining: list[tuple[str, int]] = []

    def start(self, master: tuple[str, int], buffer_address: str) -> None:
        self.note(f"learner/{self._index} started")
        while self.told("starts for long"):
            time.sleep(0.05)

    def run(self) -> Iterator[LearnerReport]:
        step = 0
        while True:
            start_s = time.monotonic()
            time.sleep(0.05)
            self.obey()
            if self._joining and not self.told("has no weights to give"):
                filled, self._joining = self._joining, []
                yield ServersFilled(servers=tuple(filled), version=FILLED)
            if self.told("drops a server"):
                (self._folder / "learner-0-drops a server").unlink()
                yield ServersLost(servers=(("rollout/0", 1),), cause="the network was cut")
            step += 1
            spans = (Span(f"learner/{self._index}", "busy", start_s, time.monotonic()),)
            yield StepDone(version=step, metrics=(Metric("reward/mean", 1.0),), spans=spans)
            if step == 3:
                yield EvaluationDue(version=step)
            if self.told("ends"):
                self.note(f"learner/{self._index} ended")
                return

    @ray.method(concurrency_group="control")
    def add_server(self, name: str, url: str, start: int) -> None:
        self.note(f"learner adds start {start} of {name} at {url}")
        self._joining.append((name, start))

    @ray.method(concurrency_group="control")
    def leave_server(self, name: str, start: int) -> None:
        self.note(f"learner removes start {start} of {name}")

    @ray.method(concurrency_group="turn")
    def begin_start(self, name: str) -> None:
        self.note(f"the turn of {name}")

    @ray.method(concurrency_group="control")
    def end_start(self, name: str) -> None:
        self.note(f"the turn of {name} ends")

    @ray.method(concurrency_group="control")
    def evaluated(self) -> None:
        self.tell("was told of the end of an evaluation")

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        since_s = time.monotonic() - (1900 if self.told("is overdue") else 75)
        return Status(doing="waits for a batch", waits_on="buffer", since_s=since_s, limit_s=1800)


class FakeReservation:
    """A reservation without placement groups: Ray may start the actors anywhere, and each server has a host."""

    gpus = 0.0

    def options(self, process: str) -> dict[str, Any]:
        return {"num_cpus": 0}

    def host_of(self, process: str) -> str:
        return "10.0.0.9"

    def has_host(self, server: str) -> bool:
        return True

    async def find_place(self, server: str) -> None: ...

    def seconds_left(self) -> dict[str, float]:
        return {}


class FakeRun:
    """A run with a supervisor in `folder`, whose processes do what the files there tell them."""

    def __init__(
        self, folder: Path, servers: int, ranks: int, timeouts: TimeoutsConfig, colocated: bool = False
    ) -> None:
        self.folder = folder
        self.config = make_config(
            run={"name": "r", "dir": folder}, logging={"wandb": "disabled"},
            placement={"rollout": {"servers": servers, "max_restarts": 1}, "colocated": colocated},
            timeouts=timeouts, eval={"every_steps": 3},
        )
        (self.config.run_dir / "logs").mkdir(parents=True)
        self.log, reservation = RunLog(self.config), cast(Reservation, FakeReservation())
        origin = Origin(os.getcwd(), self.config)
        self.processes = ActorGroup(self.config.run_dir, reservation, StopSignals(), origin)
        self.processes.start("buffer", Buffer, max_concurrency=4)
        for rank in range(ranks):
            threads = learner_threads(self.config)
            self.processes.start(f"learner/{rank}", Learner, rank, threads=threads)
        for name in ("learner-0", "learner-1", "rollout-0"):
            (self.config.run_dir / "logs" / f"{name}.log").write_text(f"last words of {name}\n")
        ray.get([actor.status.remote() for actor in self.processes.actors.values()], timeout=240)
        self.notes: list[str] = []
        self.log.logger.note = lambda text: self.notes.append(text)  # type: ignore[method-assign]
        self.supervisor = Supervisor(self.config, self.processes, self.log, {})

    def tell(self, *what: str) -> None:
        for each in what:
            (self.folder / each).touch()

    def states(self) -> dict[str, str]:
        """The states of all servers, as status.json has them."""
        return {server.name: server.state for server in self.supervisor.watchdog.servers()}

    def happened(self, *of: str) -> list[str]:
        """What the processes noted, in order: all, or the lines with one of some texts."""
        file = self.folder / "events"
        events = file.read_text().splitlines() if file.exists() else []
        return [event for event in events if not of or any(text in event for text in of)]

    def has_noted(self, text: str) -> bool:
        return any(text in note for note in self.notes)

    def train(self, revive: ReviveBuffer | None = None) -> None:
        async def give_up(death: ProcessKilledError) -> None:
            raise death

        async def start_learner(until_up: UntilUp) -> None:
            await until_up()
            limit = self.config.timeouts.limit("startup_s")
            for name in [name for name in self.processes.actors if name.startswith("learner")]:
                starting: Any = self.processes.actors[name].start.remote(("h", 1), "tcp://buffer")
                await self.processes.call(name, starting, limit, "the start")

        self.supervisor.train("tcp://buffer", revive or give_up, start_learner, self.processes.signals)


def stop(actor: Any) -> int:
    """Stop the process with SIGSTOP: it exists, but does not answer. Returns its process id."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=240)
    os.kill(pid, signal.SIGSTOP)
    return pid


def ends_when(run: FakeRun, condition: Callable[[], bool]) -> threading.Thread:
    """Have the learner end as soon as `condition` holds, or after four minutes."""
    return tells_when(run, condition, "learner-0-ends")


def tells_when(run: FakeRun, condition: Callable[[], bool], *what: str) -> threading.Thread:
    """Tell the processes `what` as soon as `condition` holds, or after four minutes."""

    def wait() -> None:
        deadline_s = time.monotonic() + 240
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        run.tell(*what)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
