from __future__ import annotations

import json

import pytest

from async_rl.base.errors import StalenessError
from buffer.modes import Wait
from buffer.store import Store
from buffer.store_state import StoredGroup, StoreState
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


def test_a_failed_group_frees_its_slot_and_is_requeued_only_on_demand() -> None:
    store = open_store()
    store.admit("rollout/0", 2, 0.0)
    store.fail(0, "reward raised", requeue=False)
    assert [(s.group_id, s.prompt_index) for s in store.admit("rollout/0", 9, 0.0)] == [(2, 2)]
    store.fail(1, "engine restarted", requeue=True)
    assert [(s.group_id, s.prompt_index) for s in store.admit("rollout/0", 9, 0.0)] == [(3, 1)]
    assert store.state.counters()["buffer/dropped_failed"] == 2
    store.state.check_accounting()


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
