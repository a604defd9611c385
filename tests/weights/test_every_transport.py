"""What every transport must do: bring all weights, also after a server has left, was started again or died in a push.

No push goes to a group or a base of a process that died: the members name the incarnation of each server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.errors import WeightSyncError
from async_rl.base.weights import PushState, open_publisher
from async_rl.base.weights.server_admin import Bucket
from async_rl.base.weights.transport import unpack
from tests.kit.configs import changed
from tests.kit.engines.forked_receiver import ForkedReceiver
from tests.kit.publishers import CONFIG, CPU, OBJECT_ENGINE, names, url_of

NUM_TENSORS = 4
OBJECTS: dict[str, dict[str, Any]] = {
    "disk": {"transport": "disk"},
    "cuda_ipc": {"transport": "cuda_ipc"},
    "new folders": {"transport": "tests.extensions.transport:NEW_FOLDERS"},
}
"""The settings of weight_sync by which servers get weights that are objects of this process."""
PROCESSES: dict[str, dict[str, Any]] = {
    "gloo": {"transport": "gloo"},
    "gloo staged": {"transport": "gloo", "double_buffer": "device"},
    "gloo delta": {"transport": "gloo", "delta": True},
    "disk, process": {"transport": "disk"},
    "disk delta": {"transport": "disk", "delta": True},
}
"""The settings of weight_sync by which servers of the hf engine get weights, in processes of their own."""


WAYS = [*OBJECTS, *(pytest.param(way, marks=pytest.mark.processes) for way in PROCESSES)]


class ObjectReceiver:
    """A server without a process that receives weights as buckets or folders."""

    def __init__(self, url: str = "") -> None:
        self.names = [f"tensor-{number}" for number in range(NUM_TENSORS)]
        self.url = url_of(self, url)
        self.is_alive = True
        self._received: dict[str, Tensor] = {}
        self._version: int | None = None
        self._serves: tuple[int, float] = (0, 0.0)

    def is_ready(self) -> bool:
        return self.is_alive

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._check_alive()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise WeightSyncError("connection refused")

    def begin_update(self) -> None:
        self._check_alive()
        self._received, self._version = {}, None

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        self._receive(dict(unpack(bucket.data, bucket.names, bucket.dtypes, bucket.shapes)), version)

    def load_folder(self, folder: Path, version: int | None) -> None:
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        if sorted(tensors) != self.names:  # the folder of a push that has failed is being removed
            raise WeightSyncError("the folder is not whole")
        self._receive(tensors, version)

    def _receive(self, tensors: dict[str, Tensor], version: int | None) -> None:
        self._check_alive()
        self._received |= {name: tensor.clone() for name, tensor in tensors.items()}
        self._version = version

    def end_update(self) -> None:
        self._check_alive()
        if self._version is not None:
            assert sorted(self._received) == self.names
            self._serves = self._version, sum(float(t.double().sum()) for t in self._received.values())

    def version(self) -> int:
        return self._serves[0]

    def checksum(self) -> float:
        return self._serves[1]

    def close(self) -> None:
        pass


Receiver = ObjectReceiver | ForkedReceiver


class Pushes:
    """Pushes to two servers as the learner's Pusher does: until a push has not failed."""

    def __init__(self, config: Config, way: str) -> None:
        self.config, self.way = config, way
        self.receivers = [self._receiver() for _ in range(2)]
        self.publisher = open_publisher(config, [receiver.url for receiver in self.receivers], 0, CPU)
        self.publisher.lost_within_s = 2.0
        self.members = self.publisher.members
        self.repeats = 0
        self.lost: list[str] = []
        self.waits: list[bool] = []
        """Whether a server waited for its first push, at the begin of each attempt."""

    def _receiver(self, url: str = "") -> Receiver:
        if self.way in OBJECTS:
            return ObjectReceiver(url)
        port = int(url.rpartition(":")[2]) if url else 0
        return ForkedReceiver(NUM_TENSORS, self.config, port)

    def push(self, version: int, kill_within: int | None = None) -> None:
        """Push tensors that hold `version`; with `kill_within` that server dies when half of them are gathered."""
        while True:
            before = [receiver.version() for receiver in self.receivers[:1]]
            report = self.publisher.push(self._tensors(version, kill_within), version)
            self.repeats += report.repeats
            self.lost += names(report.lost)
            assert self.publisher.state is (PushState.LOST if report.has_failed else PushState.SERVING)
            if not report.has_failed:
                return
            if "gloo" in self.way or self.way == "cuda_ipc":  # a folder is loaded whole, or not at all
                assert [receiver.version() for receiver in self.receivers[:1]] == before, "half a push is not served"
            kill_within = None

    def _tensors(self, version: int, kill_within: int | None) -> Iterator[tuple[str, Tensor]]:
        self.waits.append(self.members.someone_waits())
        for number, name in enumerate(self.receivers[0].names):
            if number == NUM_TENSORS // 2 and kill_within is not None:
                self.kill(kill_within)
            yield name, torch.full((512, 512), float(version))

    def kill(self, number: int) -> None:
        receiver = self.receivers[number]
        if isinstance(receiver, ObjectReceiver):
            receiver.is_alive = False
        else:
            receiver.kill()

    def start_again(self, number: int, *, same_url: bool) -> Receiver:
        self.receivers.append(self._receiver(self.receivers[number].url if same_url else ""))
        return self.receivers[-1]

    def close(self) -> None:
        self.publisher.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def pushes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pushes]:
    way: str = request.param
    made = Pushes(
        changed(
            CONFIG, rollout={"engine": OBJECT_ENGINE if way in OBJECTS else "hf"}, run={"dir": str(tmp_path)},
            weight_sync={**OBJECTS, **PROCESSES}[way], timeouts={"push_s": 600.0},  # a loss is noticed, not waited out
        ),
        way,
    )
    made.config.run_dir.mkdir()
    made.push(1)
    yield made
    made.close()


def serves(receiver: Receiver, version: int) -> bool:
    return (receiver.version(), receiver.checksum()) == (version, NUM_TENSORS * 512 * 512 * float(version))


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_every_server_serves_each_version_whole(pushes: Pushes) -> None:
    for version in (1, 2, 3):
        pushes.push(version)
        assert all(serves(receiver, version) for receiver in pushes.receivers)
    assert (pushes.repeats, pushes.lost) == (0, [])


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_the_driver_reports_a_death_between_two_pushes(pushes: Pushes) -> None:
    pushes.kill(1)
    pushes.members.leave("rollout/1")
    pushes.push(2)
    assert serves(pushes.receivers[0], 2)
    assert (pushes.members.names, pushes.repeats, pushes.lost) == (("rollout/0",), 0, [])
    again = pushes.start_again(1, same_url=False)
    pushes.members.add("rollout/1", again.url)
    pushes.push(3)
    assert serves(pushes.receivers[0], 3) and serves(again, 3)


@pytest.mark.parametrize("same_url", [False, True])
@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_successor_has_joined_before_the_next_push(pushes: Pushes, same_url: bool) -> None:
    pushes.kill(1)
    pushes.members.leave("rollout/1")
    again = pushes.start_again(1, same_url=same_url)
    pushes.members.add("rollout/1", again.url)
    pushes.push(2)
    assert serves(pushes.receivers[0], 2) and serves(again, 2)
    assert (pushes.repeats, pushes.lost) == (0, [])


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_successor_answers_at_the_same_url_before_anybody_knows_of_the_death(pushes: Pushes) -> None:
    pushes.kill(1)
    again = pushes.start_again(1, same_url=True)
    pushes.push(2)
    assert serves(pushes.receivers[0], 2) and serves(again, 2)
    assert pushes.repeats == ("gloo" in pushes.way), "a group breaks"
    assert pushes.lost == []


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_death_within_a_push_costs_that_server_alone(pushes: Pushes) -> None:
    again = pushes.start_again(1, same_url=False)
    joined = pushes.members.add("rollout/2", again.url)
    pushes.push(2, kill_within=1)
    assert serves(pushes.receivers[0], 2) and serves(again, 2)
    assert (pushes.repeats, pushes.lost) == (0, ["rollout/1"])
    assert pushes.waits[-2:] == [True, True] and joined.done(), "a failed push ends no wait"
