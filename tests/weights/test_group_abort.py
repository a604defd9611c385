"""The word by which a learner frees servers that hang in a failed push. What NCCL then does, only GPUs can show."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from async_rl.network import open_store
from async_rl.weights.group_abort import abort_when_told, tell_to_abort


class HungGroup:
    """A process group in which a collective hangs until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("told", [True, False])
def test_a_group_is_aborted_on_the_learners_word_or_at_its_end_and_no_other_is(told: bool) -> None:
    store: Any = open_store("127.0.0.1", 0, 0, 2, timedelta(seconds=20))
    hung: Any = HungGroup()
    other: Any = HungGroup()
    abort_when_told(hung, "weights-1", "127.0.0.1", store.port)
    abort_when_told(other, "weights-2", "127.0.0.1", store.port)
    assert not hung.aborted.wait(0.2)
    if told:
        tell_to_abort(store, "weights-1")
        assert hung.aborted.wait(10)
        assert not other.aborted.wait(0.2)
    del store
    assert hung.aborted.wait(10) and other.aborted.wait(10)
