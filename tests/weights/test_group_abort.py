"""The word by which a learner frees servers that hang in a failed push. What NCCL then does, only GPUs can show."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.base.config import Limit
from async_rl.base.weights import transport
from async_rl.base.weights.transport import Receiver, abort_when_told, open_gloo, open_store, tell_to_abort
from tests.kit.configs import changed
from tests.kit.publishers import CONFIG, OBJECT_ENGINE, publisher_for, url_of

GROUP = "weights-1"


class HungGroup:
    """A process group in which a collective hangs until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def store() -> Iterator[Any]:
    """The store of a group, which lives on while a server waits for the learner's word."""
    store: Any = open_store("127.0.0.1", 0, 0, 2, timedelta(seconds=20))
    yield store
    del store


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limits with which process groups are made. They are HungGroups."""
    limits: list[float] = []

    def new_group(*_: Any, timeout: timedelta, **__: Any) -> Any:
        limits.append(timeout.total_seconds())
        return HungGroup(), None

    monkeypatch.setattr(transport, "_new_process_group_helper", new_group)  # torch's
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    return limits


@pytest.mark.parametrize("told", [True, False])
def test_a_group_is_aborted_on_the_learners_word_or_at_its_end_and_no_other_is(told: bool) -> None:
    store: Any = open_store("127.0.0.1", 0, 0, 2, timedelta(seconds=20))
    hung: Any = HungGroup()
    other: Any = HungGroup()
    abort_when_told(hung, GROUP, "127.0.0.1", store.port)
    abort_when_told(other, "weights-2", "127.0.0.1", store.port)
    assert not hung.aborted.wait(0.2)
    if told:
        tell_to_abort(store, GROUP)
        assert hung.aborted.wait(10)
        assert not other.aborted.wait(0.2)
    del store
    assert hung.aborted.wait(10) and other.aborted.wait(10)


class ListeningServer:
    """A server whose half of the group hangs, and which listens for the word. It notes what it is asked."""

    def __init__(self) -> None:
        self.hung: Any = HungGroup()
        self.asked: list[str] = []

    def is_ready(self) -> bool:
        return True

    def join_group(self, *, name: str, host: str, port: int, **_: Any) -> None:
        self.asked.append("join")
        abort_when_told(self.hung, name, host, port)

    def leave_group(self, name: str) -> None:
        self.asked.append("leave")


def test_a_learner_that_gives_up_a_push_says_the_word_and_leaves_once(limits: list[float]) -> None:
    server = ListeningServer()
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(server)], open_gloo)
    publisher.transport.connect()
    assert not server.hung.aborted.wait(0.2)
    publisher.transport.give_up(is_sending=False)
    assert server.hung.aborted.wait(10)
    publisher.transport.connect()
    assert server.asked == ["join", "leave", "join"]


def test_a_group_that_is_made_with_a_short_limit_lasts_for_longer_pushes_too(limits: list[float]) -> None:
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(ListeningServer())], open_gloo)
    publisher.members.limit = Limit(2.0, "of an evaluation's first push")
    publisher.transport.connect()
    assert limits == [20.0 + 60.0]  # timeouts.push_s, and a minute more


def test_a_receiver_that_has_joined_a_group_listens_for_the_word(store: Any, limits: list[float]) -> None:
    """At the limit of the group NCCL ends a process: the word, which comes after the learner's own, must be sooner."""
    receiver = Receiver()
    receiver.join(
        master_address="127.0.0.1", master_port=store.port, rank_offset=1, world_size=2, group_name=GROUP,
        backend="gloo", timeout_s=20.0,
    )
    hung: Any = receiver.groups[GROUP]
    assert limits == [20.0 + 60.0]
    assert not hung.aborted.wait(0.2)
    tell_to_abort(store, GROUP)
    assert hung.aborted.wait(10)


SGLANG = """
import sys
from rollout_server.engines.sglang import import_stubs
import_stubs.install()
from types import SimpleNamespace
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
WeightUpdater.init_weights_update_group = lambda *_: (True, "joined")
from rollout_server.engines.sglang import server_changes
from tests.weights.test_group_abort import GROUP, HungGroup

server_changes.install()
hung = HungGroup()
updater = SimpleNamespace(
    _model_update_group={GROUP: hung}, tp_rank=0, device="cpu", gpu_id=0, get_model=lambda: None
)
join = WeightUpdater.init_weights_update_group
print(*join(updater, "127.0.0.1", int(sys.argv[1]), 1, 2, GROUP), flush=True)
sys.exit(not hung.aborted.wait(20))
"""
"""A rank of SGLang's scheduler that joins a group."""


@pytest.mark.nightly  # it imports SGLang
@pytest.mark.processes
def test_a_rank_of_sglang_that_has_joined_a_group_listens_for_the_word(store: Any) -> None:
    command = [sys.executable, "-c", SGLANG, str(store.port)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["True", "joined"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        tell_to_abort(store, GROUP)
        assert process.wait(10) == 0
