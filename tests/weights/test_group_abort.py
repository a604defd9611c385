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

from async_rl.network import open_store
from async_rl.weights import broadcast
from async_rl.weights.broadcast import BroadcastPublisher, Receiver, abort_when_told, tell_to_abort

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


def test_a_learner_that_gives_up_a_push_says_the_word(store: Any) -> None:
    hung: Any = HungGroup()
    abort_when_told(hung, GROUP, "127.0.0.1", store.port)
    publisher = BroadcastPublisher.__new__(BroadcastPublisher)
    publisher._store, publisher.group_name, publisher.group = store, GROUP, None
    publisher._abort()
    assert hung.aborted.wait(10)


def test_a_receiver_that_has_joined_a_group_listens_for_the_word(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of the group NCCL ends a process: the word, which comes after the learner's own, must be sooner."""
    hung: Any = HungGroup()
    limits: list[float] = []
    monkeypatch.setattr(broadcast, "join_group", lambda *arguments: limits.append(arguments[-1]) or hung)
    Receiver().join(
        master_address="127.0.0.1", master_port=store.port, rank_offset=1, world_size=2, group_name=GROUP,
        backend="gloo", timeout_s=20.0,
    )
    assert limits == [20.0 + 60.0]
    assert not hung.aborted.wait(0.2)
    tell_to_abort(store, GROUP)
    assert hung.aborted.wait(10)


SGLANG = """
import sys
from rollout_server.engines.sglang import import_stubs
import_stubs.install()
from types import SimpleNamespace
from rollout_server.engines.sglang import weight_updates
from tests.weights.test_group_abort import GROUP, HungGroup

weight_updates._join = lambda *_: (True, "joined")
weight_updates.receive_announced = lambda *_: None
hung = HungGroup()
updater = SimpleNamespace(
    _model_update_group={GROUP: hung}, tp_rank=0, device="cpu", gpu_id=0, get_model=lambda: None
)
print(*weight_updates._join_and_listen(updater, "127.0.0.1", int(sys.argv[1]), 1, 2, GROUP), flush=True)
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
