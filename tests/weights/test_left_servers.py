"""Pushes after a server has left or was started again: no push goes to a group or a base of the process that died."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.errors import WeightSyncError
from async_rl.weights import open_publisher
from async_rl.weights import publisher as publisher_module
from async_rl.weights.members import ServerMembership
from async_rl.weights.publisher import WeightPublisher
from benchmarks.weight_receiver import ReceiverProcess
from tests.kit.configs import changed
from tests.kit.publishers import CONFIG, CPU, PausingPublisher

NUM_TENSORS = 4
WAYS: dict[str, dict[str, Any]] = {
    "gloo": {"transport": "gloo"},
    "gloo staged": {"transport": "gloo", "staging": "device"},
    "gloo delta": {"transport": "gloo", "delta": True},
    "disk": {"transport": "disk"},
    "disk delta": {"transport": "disk", "delta": True},
}
"""The settings of weight_sync by which servers of the hf engine get weights."""


class Pushes:
    """Pushes to two servers in processes of their own, as the learner's Pusher does: until a push has not failed."""

    def __init__(self, config: Config, way: str) -> None:
        self.config, self.way = config, way
        self.receivers = [ReceiverProcess(NUM_TENSORS, config) for _ in range(2)]
        self.membership = ServerMembership()
        self.publisher: WeightPublisher = open_publisher(config, [r.url for r in self.receivers], 0, CPU)
        self.repeats = 0
        self.lost: list[str] = []

    def push(self, version: int, kill_within: int | None = None) -> None:
        """Push tensors that hold `version`; with `kill_within` that server dies when half of them are gathered."""
        while True:
            self.publisher.forget(self.membership.apply(self.publisher.servers))
            report = self.publisher.push(self._tensors(version, kill_within), version)
            self.repeats += report.repeats
            self.lost += report.lost
            if not report.has_failed:
                return
            kill_within = None

    def _tensors(self, version: int, kill_within: int | None) -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(self.receivers[0].names):
            if number == NUM_TENSORS // 2 and kill_within is not None:
                self.kill(kill_within)
            yield name, torch.full((512, 512), float(version))

    def kill(self, number: int) -> None:
        self.receivers[number].process.send_signal(signal.SIGKILL)
        self.receivers[number].process.wait()

    def start_again(self, number: int, *, same_url: bool) -> ReceiverProcess:
        port = int(self.receivers[number].url.rpartition(":")[2]) if same_url else 0
        self.receivers.append(ReceiverProcess(NUM_TENSORS, self.config, port=port))
        return self.receivers[-1]

    def close(self) -> None:
        self.publisher.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(params=["gloo", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "gloo")])
def pushes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pushes]:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 2.0)
    overrides: dict[str, dict[str, Any]] = {
        "rollout": {"engine": "hf"}, "weight_sync": WAYS[request.param], "run": {"dir": str(tmp_path)}
    }
    made = Pushes(changed(CONFIG, **overrides), request.param)
    made.push(1)
    yield made
    made.close()


def serves(receiver: ReceiverProcess, version: int) -> bool:
    return (receiver.version(), receiver.checksum()) == (version, NUM_TENSORS * 512 * 512 * float(version))


@pytest.mark.processes
def test_the_driver_tells_of_a_death_between_two_pushes(pushes: Pushes) -> None:
    pushes.kill(1)
    pushes.membership.leave("rollout/1")
    pushes.push(2)
    assert serves(pushes.receivers[0], 2)
    assert (list(pushes.publisher.servers), pushes.repeats, pushes.lost) == (["rollout/0"], 0, [])
    again = pushes.start_again(1, same_url=False)
    pushes.membership.add("rollout/1", again.url)
    pushes.push(3)
    assert serves(pushes.receivers[0], 3) and serves(again, 3)


@pytest.mark.processes
@pytest.mark.parametrize("same_url", [False, True])
def test_a_successor_has_joined_before_the_next_push(pushes: Pushes, same_url: bool) -> None:
    pushes.kill(1)
    pushes.membership.leave("rollout/1")
    again = pushes.start_again(1, same_url=same_url)
    pushes.membership.add("rollout/1", again.url)
    pushes.push(2)
    assert serves(pushes.receivers[0], 2) and serves(again, 2)
    assert (pushes.repeats, pushes.lost) == (0, [])


@pytest.mark.processes
def test_a_successor_answers_at_the_same_url_before_anybody_knows_of_the_death(pushes: Pushes) -> None:
    pushes.kill(1)
    again = pushes.start_again(1, same_url=True)
    pushes.push(2)
    assert serves(pushes.receivers[0], 2) and serves(again, 2)
    assert pushes.repeats == (pushes.way != "disk"), "a group breaks, and a successor has no base for changes"
    assert pushes.lost == []


@pytest.mark.processes
def test_a_death_within_a_push_costs_that_server_alone(pushes: Pushes) -> None:
    pushes.push(2, kill_within=1)
    assert serves(pushes.receivers[0], 2)
    assert (pushes.repeats, pushes.lost) == (0, ["rollout/1"])


class BrokenPublisher(PausingPublisher):
    """Breaks in its first `failures` pushes, while its only server answers."""

    failures = 1

    def probes(self) -> dict[str, Any]:
        return {"rollout/0": lambda: True}

    def calls(self, call: Any) -> dict[str, Any]:
        return {}

    def connect(self) -> None:
        if self.failures:
            self.failures -= 1
            raise WeightSyncError("broken")


@pytest.mark.parametrize("loses_slow_servers", [False, True])
def test_a_push_that_broke_while_every_server_answers_is_repeated_once(
    loses_slow_servers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.1)
    publisher = BrokenPublisher(CONFIG, ["http://127.0.0.1:9"], 0, CPU)
    publisher.loses_slow_servers = loses_slow_servers
    assert publisher.connect_living().repeats
    assert not publisher.connect_living().has_failed
    for _ in range(2):  # each push may be repeated once, also after a connection that was
        publisher.failures = 1
        assert publisher.push([("w", torch.zeros(1))], 1).repeats
        assert not publisher.push([("w", torch.zeros(1))], 1).has_failed
    publisher.failures = 2
    assert publisher.push([("w", torch.zeros(1))], 2).repeats
    with pytest.raises(WeightSyncError):
        publisher.push([("w", torch.zeros(1))], 2)
