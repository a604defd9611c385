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

from async_rl.base.config import (
    TimeoutsConfig,
)
from async_rl.base.errors import AsyncRLError, ProcessKilledError, WaitTimeoutError
from async_rl.base.messages.reports import (
    EvaluationDone,
    EvaluationDue,
    LearnerReport,
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
from async_rl.run.processes.placement import Reservation
from async_rl.run.processes.signals import StopSignals
from async_rl.run.processes.supervisor import Supervisor
from tests.kit.configs import make_config

STEPS = 1000


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
        if self.told("hangs"):
            time.sleep(1000)

    def dump_stacks(self) -> None: ...

    def stop(self) -> None: ...


class Buffer(FakeProcess):
    def serve(self) -> None:
        while True:
            time.sleep(0.05)
            self.obey()

    def abandon(self, worker: str, incarnation: int) -> int:
        if self.told("dies when asked"):
            (self._folder / "buffer-0-dies when asked").unlink()
            os._exit(9)
        self.note(f"{worker} abandoned")
        return 3

    def status(self) -> Status:
        return Status(doing="answers", since_s=time.monotonic())

    def close(self) -> dict[str, float]:
        return {"buffer/unaccounted": 0.0}


class Rollout(FakeProcess):
    async def start(self) -> str:
        self.note(f"{self._config.server_names[self._index]} started")
        self.tell("comes back")
        return "http://new"

    async def kv_tokens(self) -> int:
        return 1000 if self.told("comes back") else 2000

    async def connect(self, address: str, judge_urls: Sequence[str], incarnation: int) -> None:
        self.note(f"{self._config.server_names[self._index]} connected")

    async def run(self) -> AsyncIterator[WorkerReport]:
        start_s = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            self.obey()
            span = Span(self._config.server_names[self._index], "busy", start_s, time.monotonic())
            yield WorkerReport(spans=(span,))

    async def status(self) -> Status:
        return Status(doing="generates 7 groups", waits_on="its engine", since_s=time.monotonic())

    async def evaluate(
        self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)
    ) -> EvaluationDone:
        self.tell("evaluates")
        if self.told("dies when asked"):
            os._exit(9)
        if self.told("hangs when asked"):
            (self._folder / f"rollout-{self._index}-hangs when asked").unlink()
            time.sleep(1000)
        while not self.told("answers"):
            await asyncio.sleep(0.02)
        return EvaluationDone(version=version, metrics=(Metric("eval/accuracy", 0.5), Metric("eval/version", version)))


class JudgeServer(FakeProcess):
    """A server of a judge. It starts again where it was, and notes on which port."""

    def __init__(self, origin: Origin, index: int, port: int = 0) -> None:
        super().__init__(origin, index)
        self.note(f"judge/{index} made at port {port}")

    async def start(self) -> str:
        (self._folder / f"judgeserver-{self._index}-dies").unlink(missing_ok=True)
        return "http://new"

    async def kv_tokens(self) -> int:
        return 0

    async def run(self) -> AsyncIterator[WorkerReport]:
        while True:
            await asyncio.sleep(0.05)
            self.obey()
            yield WorkerReport()

    async def status(self) -> Status:
        return Status(doing="judges", since_s=time.monotonic())


class Learner(FakeProcess):
    def run(self) -> Iterator[LearnerReport]:
        for step in range(1, STEPS):
            start_s = time.monotonic()
            time.sleep(0.05)
            self.obey()
            spans = (Span(f"learner/{self._index}", "busy", start_s, time.monotonic()),)
            yield StepDone(version=step, metrics=(Metric("reward/mean", 1.0),), spans=spans)
            if self.told("drops a server"):
                yield ServersLost(servers=(("rollout/0", "http://old"),), cause="the network was cut")
            if step == 3:
                apart = self._config.server_names[self._config.placement.rollout.servers :]
                yield EvaluationDue(version=step, servers=apart)
            if self.told("ends"):
                return

    @ray.method(concurrency_group="join")
    def join_server(self, name: str, url: str) -> int:
        while self.told("has no weights to give"):
            time.sleep(0.05)
        if self.told("can not push"):
            raise WaitTimeoutError(f"{name} waited 1800 s (timeouts.batch_s) for the learner's current weights")
        return 5

    @ray.method(concurrency_group="join")
    def begin_start(self, name: str) -> None:
        self.note(f"the turn of {name}")

    @ray.method(concurrency_group="control")
    def end_start(self, name: str) -> None:
        self.note(f"the turn of {name} ends")

    @ray.method(concurrency_group="control")
    def add_eval_server(self, name: str, url: str) -> None:
        self.note(f"{name} gets the next evaluation at {url}")

    @ray.method(concurrency_group="control")
    def leave_server(self, name: str) -> None: ...

    @ray.method(concurrency_group="control")
    def evaluated(self) -> None:
        self.tell("was told of the end of an evaluation")

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        since_s = time.monotonic() - (1900 if self.told("is overdue") else 75)
        return Status(doing="waits for a batch", waits_on="buffer", since_s=since_s, limit_s=1800)


class FakeReservation:
    """A reservation without a placement group: Ray may start the actors anywhere."""

    def options(self, process: str) -> dict[str, Any]:
        return {"num_cpus": 0}

    def host_of(self, process: str) -> str:
        return "10.0.0.9"

    def why_no_host(self, process: str) -> str:
        return ""

    def has_moved(self, process: str) -> bool:
        return False

    def follow_moves(self) -> None: ...


class FakeRun:
    """A run with a supervisor in `folder`, whose processes do what the files there tell them.

    Args:
        evals: the number of evaluation servers. The first of them is told what to do as rollout server `servers`.
    """

    def __init__(
        self, folder: Path, servers: int, ranks: int, timeouts: TimeoutsConfig, colocated: bool = False, evals: int = 0,
        judges: int = 0,
    ) -> None:
        self.folder = folder
        self.config = make_config(
            run={"name": "r", "dir": folder}, logging={"wandb": "disabled"},
            placement={
                "rollout": {"servers": servers, "max_restarts": 1}, "eval": {"servers": evals}, "colocated": colocated,
                "judge": {"servers": judges},
            },
            judge={"path": "j" * judges},
            timeouts=timeouts, eval={"every_steps": 3},
        )
        (self.config.run_dir / "logs").mkdir(parents=True)
        self.log = RunLog(self.config)
        reservation, origin = cast(Reservation, FakeReservation()), Origin(os.getcwd(), self.config)
        self.processes = ActorGroup(self.config.run_dir, reservation, StopSignals(), origin)
        self.processes.start("buffer", Buffer, max_concurrency=4)
        for index, name in enumerate(self.config.server_names):
            self.processes.start(name, Rollout, index)
        for index, name in enumerate(self.config.judge_names):
            self.processes.start(name, JudgeServer, index)
        for rank in range(ranks):
            threads = learner_threads(self.config)
            self.processes.start(f"learner/{rank}", Learner, rank, threads=threads)
        for name in ("learner-0", "learner-1", "rollout-0"):
            (self.config.run_dir / "logs" / f"{name}.log").write_text(f"last words of {name}\n")
        ray.get([actor.status.remote() for actor in self.processes.actors.values()], timeout=60)
        self.notes: list[str] = []
        self.log.logger.note = self.notes.append  # type: ignore[method-assign]

    def tell(self, *what: str) -> None:
        for each in what:
            (self.folder / each).touch()

    def train(self, revive: Callable[[ProcessKilledError], None] | None = None) -> Supervisor:
        async def revive_buffer(death: ProcessKilledError) -> None:
            if revive is None:
                raise death
            revive(death)

        supervisor = Supervisor(self.config, self.processes, self.log)
        supervisor.train("tcp://buffer", revive_buffer, StopSignals(), dict.fromkeys(self.config.judge_names, "http://h:7/v1"))
        return supervisor


def stop(actor: Any) -> int:
    """Stop the process with SIGSTOP: it exists, but does not answer. Returns its process id."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    return pid


def ends_when(run: FakeRun, condition: Callable[[], bool]) -> threading.Thread:
    """Have the learner end as soon as `condition` holds, or after a minute."""
    return tells_when(run, condition, "learner-0-ends")


def tells_when(run: FakeRun, condition: Callable[[], bool], *what: str) -> threading.Thread:
    """Tell the processes `what` as soon as `condition` holds, or after a minute."""

    def wait() -> None:
        deadline_s = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        run.tell(*what)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
