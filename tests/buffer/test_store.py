from __future__ import annotations

import json
import re

import pytest

from async_rl.base.errors import StalenessError, WireError
from buffer.modes import Wait
from buffer.store import Store
from buffer.store_state import StoreState
from buffer.stored_group import StoredGroup
from tests.kit.buffer.arrivals import make_arrival, plain_rules


def open_store(max_staleness: int = 0, prompts_per_step: int = 2) -> Store:
    store = Store(plain_rules(max_staleness, prompts_per_step))
    store.served(0)
    return store


def finish_all(store: Store, group_ids: list[int]) -> None:
    for group_id in group_ids:
        store.finish(group_id, b"%d" % group_id, make_arrival())


def train(store: Store) -> list[int]:
    batch = store.take(store.state.version)
    assert batch is not None
    store.trained(store.state.version + 1)
    return [group.slot.group_id for group in batch]


def test_nothing_is_admitted_before_a_version_is_served() -> None:
    store = Store(plain_rules(0, 2))
    assert store.admit("rollout/0", 8, now_s=0.0) == []
    store.served(0)
    assert len(store.admit("rollout/0", 8, now_s=0.0)) == 2


def test_slots_are_held_until_the_version_trained_on_them_is_served() -> None:
    store = open_store(max_staleness=1)
    finish_all(store, [slot.group_id for slot in store.admit("rollout/0", 4, 0.0)])
    assert (store.capacity(), store.state.slots_held) == (0, 4)
    train(store)
    assert (store.capacity(), store.state.slots_held) == (0, 4)
    train(store)
    store.served(1)
    assert (store.capacity(), store.state.slots_held) == (2, 2)
    store.served(2)
    assert (store.capacity(), store.state.slots_held) == (4, 0)


def test_a_batch_is_handed_out_again_until_it_is_trained() -> None:
    store = open_store()
    finish_all(store, [0, 1] if store.admit("rollout/0", 2, 0.0) else [])
    assert store.take(0) == store.take(0) is not None
    store.trained(1)
    store.trained(1)
    assert store.state.counters()["buffer/trained"] == 2
    with pytest.raises(WireError, match="version: got 0"):
        store.take(0)
    assert store.take(1) is None


def test_a_failed_group_frees_its_slot_and_is_requeued_only_on_demand() -> None:
    store = open_store()
    store.admit("rollout/0", 2, 0.0)
    store.fail(0, "reward raised", requeue=False)
    assert [(s.group_id, s.prompt_index) for s in store.admit("rollout/0", 9, 0.0)] == [(2, 2)]
    store.fail(1, "engine restarted", requeue=True)
    assert [(s.group_id, s.prompt_index) for s in store.admit("rollout/0", 9, 0.0)] == [(3, 1)]
    assert store.state.counters()["buffer/dropped_failed"] == 2
    store.state.check_accounting()


def test_versions_are_trained_in_turn_and_served_only_once_trained() -> None:
    store = open_store()
    for skip in (store.trained, store.served):
        with pytest.raises(WireError, match="version: got 1"):
            skip(1)
    store.admit("rollout/0", 2, 0.0)
    finish_all(store, [0, 1])
    train(store)
    store.served(1)
    with pytest.raises(WireError, match="version: got 0"):
        store.served(0)


def test_closing_drops_what_is_left_as_shutdown_and_a_held_batch_stays_held() -> None:
    store = open_store(max_staleness=2)
    store.admit("rollout/0", 6, 0.0)
    finish_all(store, [0, 1, 2])
    store.take(0)
    store.close()
    counters = store.state.counters()
    assert (counters["buffer/dropped_shutdown"], counters["buffer/held"], counters["buffer/running"]) == (4, 2, 0)


def test_a_lost_group_is_found_by_the_accounting() -> None:
    store = open_store()
    store.admit("rollout/0", 2, 0.0)
    del store.state.running[1]
    with pytest.raises(StalenessError, match=r"2 .*admitted.* 0 .*trained, 1 dropped, 0 running"):
        store.close()


class NewestFirst(Wait):
    """A mode with a bug."""

    def choose(self, state: StoreState, version: int) -> list[StoredGroup]:
        return list(state.finished.values())[-1:]


def test_a_group_past_its_deadline_is_never_handed_out() -> None:
    store = open_store(max_staleness=1, prompts_per_step=1)
    store.mode = NewestFirst(store.rules)
    store.admit("rollout/0", 2, 0.0)
    finish_all(store, [0, 1])
    train(store)
    store.served(1)
    store.admit("rollout/0", 1, 0.0)
    finish_all(store, [2])
    train(store)  # the wrong one: group 0 expires now
    with pytest.raises(StalenessError, match=r"group 0, .*version 0, .*version 2"):
        store.take(2)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_description_says_what_a_batch_waits_for() -> None:
    store = open_store(max_staleness=1)
    store.admit("rollout/0", 1, now_s=100.0)
    store.admit("rollout/1", 3, now_s=300.0)
    store.fail(3, "reward raised ValueError", requeue=False)
    told = store.describe(now_s=512.0)  # finished, of a batch, running, for s, by rollout/0, served, failed
    assert numbers(told) == [0, 2, 3, 412, 0, 0, 1] and "reward raised ValueError" in told
    store = open_store(max_staleness=1)
    store.admit("rollout/0", 4, now_s=0.0)
    finish_all(store, [0, 2])
    train(store)
    store.served(1)
    store.admit("rollout/0", 4, now_s=5.0)
    finish_all(store, [4, 5])
    assert store.take(1) is None  # two of those that run expire by version 1, the first is group 1
    assert numbers(store.describe(now_s=10.0)) == [2, 2, 2, 10, 0, 2, 1, 1, 1]


def test_a_buffer_that_starts_again_during_a_push_that_drains_admits_no_group() -> None:
    store = Store(plain_rules(2, 1, drain=True))
    store.served(0)
    store.admit("rollout/0", 2, 0.0)
    finish_all(store, [0, 1])
    train(store)
    assert store.may_push()
    again = Store(store.rules)
    again.state.restore(store.state.rows(), json.loads(json.dumps(store.state.scalars())))
    assert again.capacity() == 0
    again.served(1)
    assert again.capacity() == 2


def test_a_buffer_that_starts_again_still_tells_workers_what_it_dropped() -> None:
    store = Store(plain_rules(1, 2, late="drop"))
    store.served(0)
    store.admit("rollout/0", 4, 0.0)
    finish_all(store, [2, 3])
    train(store)
    store.served(1)
    store.admit("rollout/0", 4, 0.0)
    finish_all(store, [4, 5])
    assert store.take(1)  # 0 and 1 still run, and can only miss their deadline
    again = Store(store.rules)
    again.state.restore(store.state.rows(), json.loads(json.dumps(store.state.scalars())))
    assert again.aborts("rollout/0") == store.aborts("rollout/0") == [0, 1]
    again.acknowledge_aborts("rollout/0", [0, 1])
    assert again.aborts("rollout/0") == []


def test_a_push_waits_for_nothing_unless_it_drains() -> None:
    store = open_store()
    store.admit("rollout/0", 1, 0.0)
    assert store.may_push() and store.capacity() == 1
