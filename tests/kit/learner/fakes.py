"""Learners whose buffer and servers are fakes, which record the calls they get."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.base.messages.reports import LearnerReport, StepDone, TrainingEnded
from async_rl.base.telemetry.timeline import Span
from async_rl.base.weights.members import Members
from async_rl.base.weights.publisher import PushReport, Tolerance
from learner.loop.learner import Learner
from tests.kit.configs import learner_config, make_config

OpenRun = Callable[..., Learner]
"""What the fixture `open_run` gives: open_run(steps, **sections)."""


class FakeClient:
    """Hands out one random batch per version and writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def take_raw(self, version: int, interrupted: Callable[[], bool]) -> list[bytes]:
        if interrupted():
            return []
        self.calls.append(("take", version))
        return [bytes([version])]

    def trained(self, version: int) -> None:
        self.calls.append(("trained", version))

    def await_push(self, version: int, interrupted: Callable[[], bool]) -> None:
        self.calls.append(("await_push", version))

    def served(self, version: int) -> None:
        self.calls.append(("served", version))

    def buffer_checkpoint(self, version: int) -> dict[str, Any]:
        self.calls.append(("buffer_checkpoint", version))
        return {}

    def close(self) -> None:
        self.calls.append(("close", -1))


class FakePublisher:
    """Keeps what was pushed last and joins the client's list of calls."""

    def __init__(self, name: str = "rollout/0", url: str = "http://x") -> None:
        self.calls: list[tuple[str, int]] = []
        self.weights: dict[str, Tensor] = {}
        self.verified: list[tuple[list[int], list[float]]] = []
        self.members = Members(make_config(), {name: url})
        self.rank = 0
        self.device = torch.device("cpu")
        self.dies_next = ""
        """Name of a server that the next push drops."""
        self.dies_at_start = ""
        """Name of a server that dies while the learner starts."""
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

    def connect(self) -> PushReport:
        self.members.apply_reports()
        self.calls.append(("connect", -1))
        if lost := self.dies_at_start:
            self.dies_at_start = ""
            return PushReport(lost=self.members.remove([lost]), cause=f"{lost} did not answer")
        return PushReport()

    def release_server_memory(self) -> None:
        self.members.apply_reports()
        self.released += [member.url for member in self.members.current]
        self.calls.append(("release_server_memory", -1))

    def push(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, erases: bool, compares: bool
    ) -> PushReport:
        self.members.apply_reports()
        self.calls.append(("push", version))
        if erases or compares:
            self.checked.append((version, erases, compares))
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}
        if lost := self.dies_next:
            self.dies_next = ""
            return PushReport(lost=self.members.remove([lost]))
        self.members.note_served()
        return PushReport(
            seconds=self.seconds, pause_s=0.25, num_bytes=7, spans=(Span("rollout/0", "sync", 1.0, 2.0),)
        )

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


def until_someone_waits(servers: Members) -> None:
    deadline = time.monotonic() + 60
    while not servers.someone_waits():
        assert time.monotonic() < deadline, "no server has asked to join within a minute"
        time.sleep(0.002)


def pushed_bytes(report: LearnerReport) -> list[float]:
    """Bytes of each push that the report tells of."""
    assert isinstance(report, StepDone | TrainingEnded)
    return [metric.value for metric in report.metrics if metric.key == "push/bytes"]


def open_learner(
    path: Path, buffer_address: str = "tcp://127.0.0.1:1", engine_urls: Sequence[str] = ("http://x",), **overrides: Any
) -> Learner:
    listener = socket.create_server(("127.0.0.1", 0))
    config = learner_config(path, **overrides)
    return Learner(config, 0, 1, *listener.getsockname(), buffer_address, list(engine_urls), listener=listener)
