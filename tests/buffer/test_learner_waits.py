"""The learner's waits for a batch, attributed to what the group that was waited for did meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.types import Batch
from buffer.client import LearnerClient, WorkerClient
from buffer.learner_waits import FAILED, PHASES, LearnerWaits, Phase
from buffer.store import Store
from tests.buffer.factories import make_config, make_group, make_outcome, plain_rules, serving
from tests.buffer.running import TIMEOUTS, with_worker

PLAYED = [Phase("queued", 1.0), Phase("generate", 2.0), Phase("tools", 4.0), Phase("generate", 1.0)]
"""The phases of a group that was granted its slot 8 s before it arrived."""
SECONDS = st.floats(0, 100)


def waited_for(waits: LearnerWaits, version: int, now_s: float) -> dict[str, float]:
    """The names with more than 0 s."""
    metrics = waits.hand_out(version, now_s)
    late_s = metrics.pop("buffer/waited_for_late_s")
    assert list(metrics) == [f"buffer/waited_for/{name}" for name in (*PHASES, FAILED)]
    assert 0 <= late_s <= sum(metrics.values()) + 1e-9
    return {key.rpartition("/")[2]: seconds for key, seconds in metrics.items() if seconds}


@pytest.mark.parametrize(
    ("begin_s", "expected"),
    [
        (109.5, {"generate": 0.5}),
        (107.0, {"tools": 2.0, "generate": 1.0}),
        (104.0, {"generate": 2.0, "tools": 4.0}),  # its phases are 102 queued 103 generate 105 tools 109 generate 110
        (90.0, {"queued": 13.0, "generate": 3.0, "tools": 4.0}),  # granted 12 s after the wait began
        (110.0, {}),
    ],
)
def test_a_wait_is_split_by_the_phases_of_the_group_that_ends_it(begin_s: float, expected: dict[str, float]) -> None:
    waits = LearnerWaits()
    waits.begin(begin_s)
    waits.arrive(PLAYED, 110.0)
    assert waited_for(waits, 0, 110.0) == pytest.approx(expected)


def test_only_the_last_of_several_groups_was_waited_for() -> None:
    waits = LearnerWaits()
    waits.begin(100.0)
    waits.arrive([Phase("tools", 50.0)], 101.0)
    waits.fail()
    waits.arrive([Phase("rewards", 3.0), Phase("generate", 1.0)], 103.0)
    assert waited_for(waits, 0, 103.0) == pytest.approx({"rewards": 2.0, "generate": 1.0})


def test_a_wait_that_ends_with_a_failed_group_was_for_nothing() -> None:
    waits = LearnerWaits()
    waits.arrive(PLAYED, 99.0)
    waits.begin(100.0)
    waits.fail()
    assert waited_for(waits, 0, 104.0) == {FAILED: 4.0}


def test_what_the_learner_does_between_two_questions_is_no_wait() -> None:
    """It asks for 2 s, pushes weights for 3 s, and asks for 1 s more."""
    waits = LearnerWaits()
    waits.begin(104.0)
    waits.begin(105.0)  # a repeated request
    waits.interrupt(106.0)
    waits.begin(109.0)
    waits.arrive(PLAYED, 110.0)
    assert waited_for(waits, 0, 110.0) == pytest.approx({"generate": 2.0, "tools": 1.0})


def test_the_part_of_a_wait_in_which_only_late_groups_are_missing_is_told() -> None:
    """The learner waits from 100 to 103 and from 105 to 110; from 102 on there are enough other groups."""
    waits = LearnerWaits()
    waits.begin(100.0)
    waits.miss_late(102.0)
    waits.interrupt(103.0)
    waits.begin(105.0)
    waits.miss_late(106.0)
    waits.arrive(PLAYED, 110.0)
    assert waits.hand_out(0, 110.0)["buffer/waited_for_late_s"] == 6.0
    waits.begin(111.0)
    waits.arrive(PLAYED, 112.0)
    assert waits.hand_out(1, 112.0)["buffer/waited_for_late_s"] == 0.0


def test_a_batch_that_is_asked_for_again_has_the_same_waits() -> None:
    waits = LearnerWaits()
    waits.begin(108.0)
    waits.arrive(PLAYED, 110.0)
    first = waits.hand_out(0, 110.0)
    waits.begin(111.0)
    assert waits.hand_out(0, 112.0) == first
    waits.begin(120.0)
    waits.arrive([Phase("rewards", 30.0)], 121.0)
    assert waited_for(waits, 1, 121.0) == {"rewards": 1.0}


@given(
    phases=st.lists(st.builds(Phase, st.sampled_from(PHASES), SECONDS), max_size=6),
    asked=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4),
    has_failed=st.booleans(),
)
def test_the_parts_add_up_to_the_wait(
    phases: list[Phase], asked: list[tuple[float, float]], has_failed: bool
) -> None:
    waits, now_s, waited_s = LearnerWaits(), 1000.0, 0.0
    for pause_s, wait_s in asked:
        waits.interrupt(now_s)
        now_s += pause_s
        waits.begin(now_s)
        now_s += wait_s
        waited_s += wait_s
    waits.arrive(phases, now_s)
    if has_failed:
        waits.fail()
    parts = waits.hand_out(0, now_s)
    assert parts.pop("buffer/waited_for_late_s") == 0
    assert sum(parts.values()) == pytest.approx(waited_s, abs=1e-6)
    assert min(parts.values()) >= 0


def test_only_with_enough_other_groups_does_a_learner_wait_for_late_ones() -> None:
    """Bound 1, batches of 2: groups 0 to 3 start at version 0. At version 1 two of them must be in the last batch."""
    rules = plain_rules(1, 2)
    store = Store(rules)
    store.served(0)
    first, second, third, fourth = (slot.group_id for slot in store.admit("rollout/0", 9, 0.0))
    for group_id in (first, second):
        assert not store.misses_late
        store.finish(group_id, b"", make_outcome())
    assert store.take(0)
    store.trained(1)
    store.served(1)
    later = [slot.group_id for slot in store.admit("rollout/0", 9, 0.0)]
    for group_id in later:
        store.finish(group_id, b"", make_outcome(1))
    assert store.take(1) is None and store.misses_late
    store.finish(third, b"", make_outcome())
    store.finish(fourth, b"", make_outcome())
    assert [row.group_id for row in store.take(1) or ()] == [third, fourth]


def test_the_metrics_come_with_the_batch() -> None:
    with serving(make_config(prompts_per_step=1)) as server:
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)

        async def run(worker: WorkerClient) -> Batch:
            (slot,) = await worker.admit(1)
            taking = asyncio.create_task(asyncio.to_thread(learner.take, 0))
            await asyncio.sleep(0.2)
            await worker.put(make_group(slot), [Phase("generate", 60.0), Phase("tools", 0.05)])
            return await taking

        counters = with_worker(server.address, run).counters
        learner.close()
    assert counters["buffer/waited_for/tools"] == pytest.approx(0.05, abs=0.04)
    assert counters["buffer/waited_for/generate"] > 0
    assert counters["buffer/waited_for/queued"] == counters["buffer/waited_for/failed"] == 0
