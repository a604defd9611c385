"""The buffer's part of a checkpoint: after a resume no prompt is lost and none is trained on twice."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.base.run_dir.checkpoints import TrainingState
from buffer.modes import open_mode
from buffer.staleness import Rules
from buffer.store import Store, buffer_checkpoint, restore_checkpoint
from buffer.store_state import StoredGroup, StoreState
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.runs import training_state

RULES = plain_rules(max_staleness=2, prompts_per_step=3)


def checkpoint(store: Store) -> TrainingState:
    return training_state(store.state.version, buffer=buffer_checkpoint(store.state))


def train_batches(store: Store, number: int) -> list[int]:
    """Prompts trained on in `number` batches of groups that finish in the order of their grants."""
    prompts = []
    store.served(store.state.version)
    for _ in range(number):
        store.admit("w", 99, 0.0)
        while (taken := store.take(store.state.version)) is None:
            oldest = store.state.running[min(store.state.running)]
            store.finish(oldest.group_id, b"group", make_arrival(newest_version=oldest.start_version))
        prompts += [row.prompt_index for row in taken]
        store.trained(store.state.version + 1)
        store.served(store.state.version)
    return prompts


def resumed_state(
    saved: TrainingState, past: Mapping[int, StoredGroup] | None = None, rules: Rules = RULES
) -> StoreState:
    state = StoreState()
    restore_checkpoint(saved, state, open_mode(rules), past or {})
    return state


@given(before=st.integers(0, 4), lost=st.integers(0, 4), after=st.integers(1, 4))
def test_prompts_are_trained_on_exactly_once_across_a_resume(before: int, lost: int, after: int) -> None:
    store = Store(RULES)
    prompts = train_batches(store, before)
    store.admit("w", 4, 0.0)
    saved = checkpoint(store)
    train_batches(store, lost)  # after the checkpoint: the resumed run discards it

    resumed = Store(RULES, resumed_state(saved))
    assert resumed.state.version == before
    assert resumed.capacity() == 0  # until the learner says what the servers serve
    prompts += train_batches(resumed, after)
    assert sorted(prompts) == list(range(3 * (before + after)))
    resumed.close()
    counters = resumed.state.counters()
    assert counters["buffer/unaccounted"] == 0
    assert counters["buffer/trained"] == 3 * (before + after)


def test_a_worker_of_a_resumed_run_aborts_no_group_of_the_earlier_run() -> None:
    store = Store(plain_rules(1, 2, late="drop"))
    store.served(0)
    store.admit("w", 4, 0.0)
    for version, arrived in enumerate([(2, 3), (4, 5)]):
        for group_id in arrived:
            store.finish(group_id, b"group", make_arrival(newest_version=version))
        assert store.take(version)
        store.trained(version + 1)
        store.served(version + 1)
        store.admit("w", 4, 0.0)
    assert store.aborts("w") == [0, 1]
    resumed = Store(store.rules, resumed_state(checkpoint(store), rules=store.rules))
    assert resumed.aborts("w") == []


def old_run(rules: Rules = RULES) -> tuple[Store, dict[int, StoredGroup]]:
    """A store at version 2 with the prompts from 6 on granted, and the newest row of each group, as in a journal."""
    rows: dict[int, StoredGroup] = {}
    store = Store(rules, StoreState(record=lambda row: rows.update({row.group_id: row})))
    train_batches(store, 2)
    store.admit("w", 99, 0.0)
    return store, rows


def drops_of(state: StoreState) -> dict[str, int]:
    return {reason: number for reason, number in state.accounting.dropped.items() if number}


def test_a_resume_with_a_lower_bound_keeps_only_what_that_bound_allows() -> None:
    store, past = old_run()
    for group_id in list(store.state.running):
        store.finish(group_id, b"group", make_arrival(newest_version=store.state.running[group_id].start_version))
    saved = checkpoint(store)
    starts = sorted(row.start_version for row in store.state.finished.values())
    assert starts[0] < 2 and len(starts) > 6
    for late, bound in [("wait", 0), ("wait", 1), ("drop", 0), ("mask", 1)]:
        rules = plain_rules(bound, 3, late=late)
        resumed = resumed_state(saved, past, rules)
        deadlines = sorted(row.start_version + bound for row in resumed.finished.values())
        if late == "wait":
            assert all(sum(d <= by for d in deadlines) <= 3 * (by - 2 + 1) for by in range(1, 6))
        else:
            assert deadlines == [start + bound for start in starts if start + bound >= 2]
        assert deadlines and drops_of(resumed) == {"late": len(starts) - len(deadlines)}
        store_after = Store(rules, resumed)
        assert len(train_batches(store_after, 4)) == 12


@pytest.mark.parametrize("has_past", [True, False])
def test_exact_mode_continues_or_counts_anew_from_the_resume(has_past: bool) -> None:
    rules = plain_rules(2, 3, exact=True)
    rows: dict[int, StoredGroup] = {}
    store = Store(rules, StoreState(record=lambda row: rows.update({row.group_id: row})))
    assert exact_ages(store, 4) == [0, 1, 2, 2]
    resumed = resumed_state(checkpoint(store), rows if has_past else {}, rules)
    assert exact_ages(Store(rules, resumed), 4) == ([2, 2, 2, 2] if has_past else [0, 1, 2, 2])


def exact_ages(store: Store, number: int) -> list[int]:
    """Staleness of the next batches, if every group is generated before a push, as in exact mode."""
    ages = []
    store.served(store.state.version)
    for _ in range(number):
        store.admit("w", 99, 0.0)
        for group_id, row in list(store.state.running.items()):
            store.finish(group_id, b"group", make_arrival(newest_version=row.start_version))
        taken = store.take(store.state.version)
        assert taken
        (age,) = {store.state.version - row.start_version for row in taken}
        ages.append(age)
        store.trained(store.state.version + 1)
        store.served(store.state.version)
    return ages
