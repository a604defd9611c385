"""The order of the calls in a staged push, and the words by which a server receives buckets while it samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.publisher import PushState
from async_rl.base.weights.servers import Bucket
from rollout_server.engines.sglang import staged_weights
from rollout_server.engines.sglang.staged_weights import BucketAnnouncer
from tests.kit.configs import make_config
from tests.kit.publishers import OBJECT_ENGINE, AnyServer, PausingTransport, publisher_for, url_of

LIMIT = Limit(5.0, "timeouts.push_s")
BUCKET = Bucket(names=["w"], dtypes=["float32"], shapes=[[1]], data=torch.zeros(4, dtype=torch.uint8), is_last=True)


@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("staging", ["none", "device"])
def test_a_staged_push_pauses_servers_only_to_swap(staging: str, erases: bool) -> None:
    """The states are those of the diagram in publisher.py."""
    calls: list[str] = []
    states: dict[str, PushState] = {}

    def note(call: str) -> None:
        calls.append(call)
        states[call] = publisher.state

    config = make_config(rollout={"engine": OBJECT_ENGINE}, weight_sync={"double_buffer": staging})
    publisher = publisher_for(config, [url_of(AnyServer(note))], partial(NotingTransport, note))
    publisher.push(noted_tensors(note), 1, erases=erases)
    pause = ["pause", *(["erase_weights"] if erases else [])]
    begin = ["begin_update", "send"]
    done = ["end_update", "resume", "served 1"]
    assert calls == ["connect", *(pause + begin if staging == "none" else begin + pause), *done]
    sending = dict.fromkeys([*pause, *begin, "end_update"], PushState.SENDING)
    assert states == {
        "connect": PushState.GATHERING, **sending, "resume": PushState.VERIFYING, "served 1": PushState.SERVING
    }


def noted_tensors(note: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    note("send")
    yield "w", torch.zeros(1)


class NotingTransport(PausingTransport):
    def __init__(self, note: Callable[[str], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.note = note

    def connect(self) -> None:
        self.note("connect")

    def end_push(self, served: int | None) -> None:
        self.note(f"served {served}")


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def answer(store: TCPStore, ranks: range, why: str, times: int = 1) -> None:
    """Give the receipts of so many buckets as the ranks of a server would."""
    group = PrefixStore("g", store)

    def work() -> None:
        for number in range(times):
            group.wait([f"bucket/{ranks.start}/{number}"], timedelta(seconds=5))
            for rank in ranks:
                group.set(f"receipt/{rank}/{number}", why if rank == ranks.stop - 1 else "")

    threading.Thread(target=work, daemon=True).start()


def announce(store: TCPStore, *, is_alive: bool = True, limit: Limit = LIMIT, times: int = 1) -> None:
    announcer = BucketAnnouncer("127.0.0.1", store.port, "g", range(1, 3))
    for number in range(times):
        announcer.announce(BUCKET, "host", number == 0, limit, lambda: is_alive)


def test_a_bucket_is_received_by_every_rank_and_leaves_nothing_in_the_store(store: TCPStore) -> None:
    before = store.num_keys()
    answer(store, range(1, 3), "", times=2)
    announce(store, times=2)
    assert store.num_keys() == before


def test_a_server_that_can_not_receive_says_why(store: TCPStore) -> None:
    answer(store, range(1, 3), "OutOfMemoryError: 16 GB")
    with pytest.raises(WeightSyncError, match="OutOfMemoryError: 16 GB"):
        announce(store)


def test_a_server_that_misses_a_single_probe_still_receives(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_weights, "PROBE_S", 0.02)
    probes = iter([False])
    threading.Timer(0.3, answer, (store, range(1, 2), "")).start()
    announcer = BucketAnnouncer("127.0.0.1", store.port, "g", range(1, 2))
    announcer.announce(BUCKET, "host", True, LIMIT, lambda: next(probes, True))


def test_a_server_that_dies_or_is_silent_is_not_waited_for(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_weights, "PROBE_S", 0.02)
    with pytest.raises(WeightSyncError):
        announce(store, is_alive=False)
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.push_s"):
        announce(store, limit=Limit(0.1, "timeouts.push_s"))
