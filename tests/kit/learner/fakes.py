"""Learners whose buffer and servers are fakes, which record the calls they get."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from async_rl.base.messages.reports import LearnerReport, StepDone, TrainingEnded
from async_rl.base.telemetry.timeline import Span
from async_rl.base.weights.publisher import PushReport, Tolerance
from async_rl.base.weights.servers import Members
from learner.loop.learner import Learner
from tests.kit.configs import learner_config, make_config

OpenRun = Callable[..., Learner]
"""What the fixture `open_run` gives: open_run(steps, **sections)."""


class FakeClient:
    """Hands out one random batch per version and writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_ready = False
        """Whether every batch is there before it is asked for, so that nothing interrupts the wait for it."""

    def take_raw(self, version: int, interrupted: Callable[[], bool]) -> list[bytes]:
        if not self.is_ready and interrupted():
            return []
        self.calls.append(("take", version))
        return [bytes([version])]

    def trained(self, version: int) -> None:
        self.calls.append(("trained", version))

    def await_push(self, version: int, interrupted: Callable[[], bool]) -> None:
        self.calls.append(("await_push", version))

    def served(self, version: int) -> None:
        self.calls.append(("served", version))

    def ended(self, version: int) -> None:
        self.calls.append(("ended", version))

    def buffer_checkpoint(self, version: int) -> dict[str, Any]:
        self.calls.append(("buffer_checkpoint", version))
        return {}

    def close(self) -> None:
        self.calls.append(("close", -1))


class FakePublisher:
    """Keeps what was pushed last and joins the client's list of calls."""

    def __init__(self, filled_for: FakePublisher | None = None) -> None:
        self.calls: list[tuple[str, int]] = filled_for.calls if filled_for else []
        self._pushes = "fill" if filled_for else "push"
        self.filler = None if filled_for else FakePublisher(self)
        """Brings servers their first weights."""
        self.weights: dict[str, Tensor] = {}
        self.verified: list[tuple[list[int], list[float]]] = []
        self.members = Members(make_config())
        self.rank = 0
        self.transport = SimpleNamespace(disconnect=lambda: None)
        self.dies_next = ""
        """Name of a server that the next push drops."""
        self.dies_before_verification = False
        """Whether all servers die between the next push and its verification."""
        self.differs_next = ""
        """Name of a server whose logprobs differ in the next comparison after the first."""
        self.checked: list[tuple[int, bool, bool]] = []
        """(version, erases, compares) of each push that does either."""
        self.released: list[str] = []
        """URLs of the servers that were asked to release their memory."""
        self.seconds = 0.5
        """How long a push takes, by its report."""

    def release_server_memory(self) -> None:
        self.members.apply_reports()
        self.released += [member.url for member in self.members.current]
        self.calls.append(("release_server_memory", -1))

    def push(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, erases: bool, compares: bool
    ) -> PushReport:
        self.members.apply_reports()
        self.calls.append((self._pushes, version))
        if erases or compares:
            self.checked.append((version, erases, compares))
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}
        if lost := self.dies_next:
            self.dies_next = ""
            return PushReport(lost=self.members.remove([lost]), cause=f"{lost} did not answer")
        spans = tuple(Span(name, "sync", 1.0, 2.0) for name in self.members.names)
        return PushReport(seconds=self.seconds, pause_s=0.25, num_bytes=7, spans=spans)

    def verify(self, tokens: list[int], logprobs: list[float], tolerance: Tolerance) -> bool:
        if self.dies_before_verification:
            self.dies_before_verification = False
            return False
        self.verified.append((tokens, logprobs))
        return True

    def compare(self, tokens: list[int], logprobs: list[float], tolerance: Tolerance) -> dict[str, str]:
        differing, self.differs_next = self.differs_next, ""
        found = {name: f"{name} differs" if name == differing else "" for name in self.members.names}
        self.verified.append((tokens, logprobs))
        return found

    def close(self) -> None:
        pass


def pushed_bytes(report: LearnerReport) -> list[float]:
    """Bytes of each push that the report tells of."""
    assert isinstance(report, StepDone | TrainingEnded)
    return [metric.value for metric in report.metrics if metric.key == "push/bytes"]


def open_learner(path: Path, buffer_address: str = "tcp://127.0.0.1:1", **overrides: Any) -> Learner:
    """A learner whose servers have started and wait for their first weights."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = learner_config(path, **overrides)
    learner = Learner(config, 0, 1, *listener.getsockname(), buffer_address, listener=listener)
    for name in config.server_names:
        learner.servers[name.partition("/")[0]].join(name, f"http://{name}", 1)
    return learner
