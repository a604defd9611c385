"""What the learner checks of a batch, and what it does next by the answers of the buffer and of the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import StalenessConfig
from async_rl.base.errors import NothingToLearnError, StalenessError
from async_rl.base.types import Batch
from learner.loop.batches import NoBatch, Taken, ask_buffer, check_bound, check_staleness, share_taken
from tests.kit.groups import batch_of, make_group, make_row


def batch_with_versions(versions: list[int], version: int) -> Batch:
    row = make_row([5] * len(versions), [-1.0] * len(versions), 1.0)
    row.versions[:] = np.array(versions)
    return batch_of(make_group(7, [3], [row], versions[0]), version=version)


@pytest.mark.parametrize("versions", [[3, 4, 5], [5], [3]])
def test_tokens_within_the_bound_pass(versions: list[int]) -> None:
    check_bound(batch_with_versions(versions, 5), 5, 2)


@pytest.mark.parametrize(("versions", "of_batch", "now", "rules"), [
    ([2, 5, 5, 5], 5, 5, StalenessConfig(max=2)), ([3, 5], 5, 5, StalenessConfig(max=1, on_late="drop")),
    # With mask old tokens are masked (test_episodes.py); tokens and batches of the future are refused all the same.
    ([4, 5], 5, 4, StalenessConfig(max=1, on_late="mask")), ([4, 5], 4, 4, StalenessConfig(max=1, on_late="mask")),
])  # fmt: skip
def test_one_token_that_is_too_old_or_of_the_future_is_enough_to_refuse_a_batch(
    versions: list[int], of_batch: int, now: int, rules: StalenessConfig
) -> None:
    with pytest.raises(StalenessError):
        check_staleness(batch_with_versions(versions, of_batch), now, rules)


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
