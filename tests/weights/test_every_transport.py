"""What every transport must do: bring all weights, also after a server has left, was started again or died in a push.

No push goes to a group or a base of a process that died: the members name the incarnation of each server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.weights.parcels import SUFFIX, adapter_parcel, checksum
from async_rl.base.weights.publisher import PushState, WeightPublisher, open_filler, open_publisher
from benchmarks.weight_receiver import tensor_names
from tests.kit.configs import changed
from tests.kit.engines.forked_receiver import ForkedReceiver
from tests.kit.engines.object_receiver import ObjectReceiver
from tests.kit.publishers import CONFIG, CPU, OBJECT_ENGINE, names

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
    "gloo adapter": {"transport": "gloo", "lora": "adapter", "bucket_bytes": 4096},
    "disk, process": {"transport": "disk"},
    "disk delta": {"transport": "disk", "delta": True},
}
"""The settings of weight_sync by which servers of the hf engine get weights, in processes of their own."""


NIGHTLY = ("gloo staged", "disk delta")
"""Ways that combine what others try alone."""
WAYS = [
    *OBJECTS,
    *(pytest.param(way, marks=pytest.mark.processes) for way in PROCESSES if way not in NIGHTLY),
    *(pytest.param(way, marks=[pytest.mark.processes, pytest.mark.nightly]) for way in NIGHTLY),
]


Receiver = ObjectReceiver | ForkedReceiver


class Pushes:
    """Pushes to servers as the learner's Pusher does: until a push has not failed. Joiners are filled first."""

    def __init__(self, config: Config, way: str) -> None:
        self.config, self.way = config, way
        self.receivers: list[Receiver] = []
        self.publisher = open_publisher(config, [], 0, CPU)
        self.filler = open_filler(self.publisher)
        self.publisher.lost_within_s = self.filler.lost_within_s = 2.0
        self.members = self.publisher.members
        self.repeats = 0
        self.lost: list[str] = []

    def start(self, *, in_place_of: Receiver | None = None) -> Receiver:
        """Start another server, perhaps at the URL of a dead one."""
        url = in_place_of.url if in_place_of else ""
        if self.way in OBJECTS:
            self.receivers.append(ObjectReceiver(tensor_names(NUM_TENSORS), url))
        else:
            port = int(url.rpartition(":")[2]) if url else 0
            self.receivers.append(ForkedReceiver(NUM_TENSORS, self.config, port))
        return self.receivers[-1]

    def fill(self, version: int, kills: Receiver | None = None) -> None:
        """Push to the servers that have joined, and admit them."""
        self.filler.members.replace(self.members.take_joining())
        self._push(self.filler, version, kills)
        self.filler.transport.disconnect()
        self.members.admit(self.filler.members.current)

    def push(self, version: int, kills: Receiver | None = None) -> None:
        """Push tensors that hold `version`; `kills` dies when half of them are gathered."""
        self._push(self.publisher, version, kills)

    def _push(self, publisher: WeightPublisher, version: int, kills: Receiver | None) -> None:
        while True:
            before = [receiver.version() for receiver in self.receivers[:1]]
            report = publisher.push(self._tensors(version, kills), version)
            self.repeats += report.repeats
            self.lost += names(report.lost)
            assert publisher.state is (PushState.LOST if report.has_failed else PushState.SERVING)
            if not report.has_failed:
                return
            if "gloo" in self.way or self.way == "cuda_ipc":  # a folder is loaded whole, or not at all
                assert [receiver.version() for receiver in self.receivers[:1]] == before, "half a push is not served"
            kills = None

    def _tensors(self, version: int, kills: Receiver | None) -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(tensor_names(NUM_TENSORS)):
            if number == NUM_TENSORS // 2 and kills:
                kill(kills)
            weight = torch.full((512, 512), float(version))
            yield adapted(name, version) if self.config.weight_sync.lora == "adapter" else (name, weight)

    def close(self) -> None:
        self.publisher.close()
        for receiver in self.receivers:
            receiver.close()


BASE = torch.ones(512, 512)
"""Each tensor of the model folder from which servers start."""


def adapted(name: str, version: int) -> tuple[str, Tensor]:
    """A parcel that makes of BASE a tensor that holds `version`: 1 + .5 * 2 * (version - 1)."""
    a, b = torch.ones(2, 512), torch.full((512, 2), version - 1.0)
    return name + SUFFIX, adapter_parcel(a, b, 0.5, BASE.dtype, checksum(BASE))


def kill(receiver: Receiver) -> None:
    if isinstance(receiver, ObjectReceiver):
        receiver.is_alive = False
    else:
        receiver.kill()


@pytest.fixture
def pushes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pushes]:
    """Two servers have got version 1 as their first weights."""
    way: str = request.param
    sync, model = {**OBJECTS, **PROCESSES}[way], tmp_path / "model"
    model.mkdir()
    save_file({name: BASE.clone() for name in tensor_names(NUM_TENSORS)}, model / "model.safetensors")
    made = Pushes(
        changed(
            CONFIG, model={"path": model, "lora": {"rank": 2 * ("lora" in sync)}}, run={"dir": str(tmp_path)},
            rollout={"engine": OBJECT_ENGINE if way in OBJECTS else "hf"}, weight_sync=sync,
            timeouts={"push_s": 600.0},  # a loss is noticed, not waited out
        ),
        way,
    )
    made.config.run_dir.mkdir()
    for number in range(2):
        made.members.join(f"rollout/{number}", made.start().url, 1)
    made.fill(1)
    yield made
    made.close()


def serves(receiver: Receiver, version: int) -> bool:
    return (receiver.version(), receiver.checksum()) == (version, NUM_TENSORS * 512 * 512 * float(version))


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_the_driver_reports_a_death_between_two_pushes(pushes: Pushes) -> None:
    first, second = pushes.receivers
    kill(second)
    pushes.members.leave("rollout/1", 1)
    pushes.push(2)
    assert serves(first, 2)
    assert (pushes.members.names, pushes.repeats, pushes.lost) == (("rollout/0",), 0, [])
    again = pushes.start()
    pushes.members.join("rollout/1", again.url, 2)
    pushes.fill(2)
    assert serves(again, 2)
    pushes.push(3)
    assert serves(first, 3) and serves(again, 3)


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_successor_has_joined_before_the_next_push(pushes: Pushes) -> None:
    first, second = pushes.receivers
    kill(second)
    pushes.members.leave("rollout/1", 1)
    again = pushes.start(in_place_of=second)
    pushes.members.join("rollout/1", again.url, 2)
    pushes.fill(1)
    assert serves(again, 1)
    pushes.push(2)
    assert serves(first, 2) and serves(again, 2)
    assert (pushes.repeats, pushes.lost) == (0, [])


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_successor_answers_at_the_same_url_before_anybody_knows_of_the_death(pushes: Pushes) -> None:
    first, second = pushes.receivers
    pushes.push(2)  # with which a group of both is made
    kill(second)
    again = pushes.start(in_place_of=second)
    pushes.push(3)
    assert serves(first, 3) and serves(again, 3)
    assert pushes.repeats == ("gloo" in pushes.way), "a group breaks"
    assert pushes.lost == []


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_death_within_a_push_costs_that_server_alone(pushes: Pushes) -> None:
    first, second = pushes.receivers
    third = pushes.start()
    pushes.members.join("rollout/2", third.url, 1)
    pushes.fill(1)
    pushes.push(2, kills=second)
    assert serves(first, 2) and serves(third, 2)
    assert (pushes.repeats, pushes.lost) == (0, ["rollout/1"])


@pytest.mark.parametrize("pushes", WAYS, indirect=True)
def test_a_death_within_a_fill_costs_that_server_alone(pushes: Pushes) -> None:
    """Another one that is filled beside it gets its weights; those that have theirs get the next push."""
    first, second = pushes.receivers
    third, fourth = pushes.start(), pushes.start()
    pushes.members.join("rollout/2", third.url, 1)
    pushes.members.join("rollout/3", fourth.url, 1)
    pushes.fill(1, kills=third)
    assert serves(first, 1) and serves(second, 1) and serves(fourth, 1)
    assert (pushes.repeats, pushes.lost) == (0, ["rollout/2"])
    pushes.push(2)
    assert serves(first, 2) and serves(second, 2) and serves(fourth, 2)
    assert (pushes.repeats, pushes.lost) == (0, ["rollout/2"])
