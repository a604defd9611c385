"""Pushes of two learner ranks in turns with their servers, which get memory only when both ranks have freed theirs.

Both ranks are threads of this process, with a GPU that only notes when its cache is freed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.weights.disk import DiskTransport
from async_rl.base.weights.publisher import PushReport
from async_rl.base.weights.servers import Member
from tests.kit.configs import make_config
from tests.kit.publishers import OBJECT_ENGINE, AnyServer, names, publisher_for, url_of

BEGIN = ["rank 0 frees", "pause"]
PLACEMENT: Any = {"colocated": True, "learner": {"ranks": 2}, "rollout": {"servers": 2}}


class Events:
    """Notes what happens on both ranks, in order, and lets a rank wait for what happens on the other."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._changed = threading.Condition()

    def note(self, event: str) -> None:
        with self._changed:
            self.seen.append(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.seen, 30), f"no {event} within 30 s: {self.seen}"


class Ranks:
    """Two ranks that push through files to one server. Rank 1 pushes in a thread of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
        sync = {"on_update": "retract"}
        config = make_config(
            folder, run={"dir": folder}, rollout={"engine": OBJECT_ENGINE}, weight_sync=sync, placement=PLACEMENT
        )
        assert config.shares_gpus
        self.events = Events()
        urls, device = [url_of(AnyServer(self.events.note, is_alive))], torch.device("cuda")
        self.first, self.other = (publisher_for(config, urls, DiskTransport, rank, device) for rank in (0, 1))
        self.first.lost_within_s = 0.1
        monkeypatch.setattr(torch.cuda, "empty_cache", self._note_freed)

    def _note_freed(self) -> None:
        rank = 1 if threading.current_thread().name == "rank 1" else 0
        self.events.note(f"rank {rank} frees")

    def push(self, begins_after: str, gathers_until: str) -> PushReport:
        """Push on both ranks. Rank 1 begins late, and gathers for long: until rank 0 has come to these events."""

        def gathered() -> Iterator[tuple[str, Tensor]]:
            yield "w", torch.ones(4)
            self.events.wait_for(gathers_until)
            time.sleep(0.3)  # rank 0 would go on meanwhile if it did not wait

        def push_of_rank_1() -> None:
            self.events.wait_for(begins_after)
            self.other.push(gathered(), 1)

        self.events.seen.clear()
        thread = threading.Thread(target=push_of_rank_1, name="rank 1")
        thread.start()
        report = self.first.push([("w", torch.ones(4))], 1)
        thread.join(30)
        assert not thread.is_alive()
        return report


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch, is_alive=getattr(request, "param", True))


def check_order(seen: list[str]) -> None:
    """Weights come back once both ranks have freed what a step has left, KV caches once both have gathered all."""
    assert seen[:7] == [*BEGIN, "rank 1 frees", "resume_memory weights", "begin_update", "load_folder", "end_update"]
    assert sorted(seen[7:9]) == ["rank 0 frees", "rank 1 frees"]
    assert seen[9:] == ["resume_memory kv_cache", "resume"]


def test_servers_get_memory_back_when_every_rank_has_freed_its_own(ranks: Ranks) -> None:
    for _ in range(2):  # the words of the push before are not heard again
        assert ranks.push(begins_after="pause", gathers_until="end_update").lost == ()
        check_order(ranks.events.seen)


@pytest.mark.parametrize("ranks", [False], indirect=True)
def test_a_push_that_fails_on_rank_0_leaves_no_other_rank_waiting(ranks: Ranks) -> None:
    assert names(ranks.push(begins_after="pause", gathers_until="pause").lost) == ("rollout/0",)
    assert "resume_memory weights" not in ranks.events.seen
    assert ranks.events.seen.count("rank 1 frees") == 2
    ranks.first.members.admit([Member("rollout/0", url_of(AnyServer(ranks.events.note)), 2)])
    assert ranks.push(begins_after="pause", gathers_until="end_update").lost == ()
    check_order(ranks.events.seen)


def test_a_rank_that_frees_nothing_is_named_by_the_rank_that_waits(ranks: Ranks) -> None:
    ranks.first.members.limit = Limit(1.0, "of a test")
    with pytest.raises(WaitTimeoutError, match=r"of a test.*learner rank 1"):
        ranks.first.push([("w", torch.ones(4))], 1)
    assert ranks.events.seen == BEGIN


def test_ranks_that_take_no_turns_with_servers_free_nothing_and_wait_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.note("frees"))
    config = make_config(
        tmp_path, run={"dir": tmp_path}, rollout={"engine": OBJECT_ENGINE}, staleness={"max": 1}, placement=PLACEMENT
    )
    publisher = publisher_for(config, [url_of(AnyServer(events.note))], DiskTransport, device=torch.device("cuda"))
    assert publisher.push([("w", torch.ones(4))], 1).lost == ()
    assert events.seen == ["pause", "begin_update", "load_folder", "end_update", "resume"]
