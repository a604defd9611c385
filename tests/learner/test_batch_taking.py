from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from async_rl.base.errors import NothingToLearnError
from learner.loop.batches import NoBatch, Taken, ask_buffer, await_push, share_taken


@pytest.mark.parametrize("taken", [
    [b"header", b"", b"frame two"], [b"weights wait"], NoBatch("servers wait"), NoBatch("stopped"),
    NoBatch("nothing to learn", "the task is solved"),
])
def test_every_kind_of_answer_arrives_as_it_was_sent(taken: Taken, one_rank: None) -> None:
    assert share_taken(taken) == taken


@pytest.mark.parametrize(("frames", "asked", "expected"), [
    ([b"a batch"], None, [b"a batch"]), ([], NoBatch("stopped"), NoBatch("stopped")),
    ([], NoBatch("ended", "good enough"), NoBatch("ended", "good enough")), ([], None, NoBatch("servers wait")),
    (None, NoBatch("stopped"), NoBatch("nothing to learn", "the task is solved")),
])
def test_the_buffers_answer_decides_what_the_learner_does_next(
    frames: list[bytes] | None, asked: NoBatch | None, expected: Taken
) -> None:
    class Client:
        def take_raw(self, version: int, interrupted: Callable[[], bool]) -> list[bytes]:
            assert interrupted()
            if frames is None:
                raise NothingToLearnError("the task is solved")
            return frames

    client: Any = Client()
    assert ask_buffer(client, 3, lambda: asked, lambda: asked is None) == expected


def test_a_paused_learner_does_not_ask_for_a_batch() -> None:
    client: Any = None
    assert ask_buffer(client, 3, lambda: NoBatch("paused"), lambda: False) == NoBatch("paused")


def test_a_server_that_joins_in_a_pause_gets_its_weights() -> None:
    client: Any = None
    assert ask_buffer(client, 3, lambda: NoBatch("paused"), lambda: True) == NoBatch("servers wait")


@pytest.mark.parametrize(("asked", "ended"), [
    (None, None), (NoBatch("paused"), None), (NoBatch("checkpoint wanted"), None),
    (NoBatch("stopped"), NoBatch("stopped")), (NoBatch("ended", "good enough"), NoBatch("ended", "good enough")),
])
def test_a_wait_for_a_push_heeds_nothing_but_an_end(
    asked: NoBatch | None, ended: NoBatch | None, one_rank: None
) -> None:
    class Client:
        def await_push(self, version: int, interrupted: Callable[[], bool]) -> None:
            assert version == 3 and interrupted() == (ended is not None)

    client: Any = Client()
    assert await_push(client, 3, lambda: asked) == ended


def test_a_push_that_waits_in_vain_is_not_made(one_rank: None) -> None:
    class Client:
        def await_push(self, version: int, interrupted: Callable[[], bool]) -> None:
            raise NothingToLearnError("the task is solved")

    client: Any = Client()
    assert await_push(client, 3, lambda: None) == NoBatch("nothing to learn", "the task is solved")
