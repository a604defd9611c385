from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from buffer.modes import Drop, Mask, Wait
from buffer.staleness import (
    Rules,
    admission_capacity,
    exact_start_version,
    fresh_to_take,
    overfull_deadline,
    vacant_batches,
    young_enough,
)
from buffer.store_state import StoredGroup
from tests.kit.buffer.arrivals import make_arrival
from tests.kit.configs import make_config


def rules(max_staleness: int, size: int, fresh: int | None = None, **changes: object) -> Rules:
    fresh = fresh or size
    slots = (max_staleness + 1) * fresh
    plain = Rules(
        max_staleness=max_staleness, prompts_per_step=size, fresh_per_step=fresh, every_steps=1, slots=slots
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bound", "depth", "fresh", "slots"),
    [
        (0, "max", 16, 16), (2, "max", 16, 48), (2, "max", 6, 18), (2, 2, 16, 48), (8, 1.25, 16, 36), (8, 0, 16, 16),
        (8, 0.25, 2, 3), (8, 0.75, 3, 6),  # rounded up: 2.5 and 5.25
    ],
)
def test_slots_are_depth_plus_one_batches_rounded_up(bound: int, depth: Any, fresh: int, slots: int) -> None:
    config = make_config(staleness={"max": bound, "depth": depth}, learner={"prompts_per_step": fresh})
    assert config.slots == slots


def test_a_batch_waits_for_a_running_group_that_expires_with_it() -> None:
    assert fresh_to_take(Counter([6, 6]), Counter([5]), 0, version=4, rules=rules(2, 2)) == 2
    assert fresh_to_take(Counter([6, 6]), Counter([4]), 0, version=4, rules=rules(2, 2)) is None
    assert overfull_deadline(Counter([6, 6]), Counter([4]), version=4, rules=rules(2, 2)) == 4


def test_a_batch_waits_when_the_next_one_could_not_hold_all_that_expire_then() -> None:
    # Nothing expires at version 4, but three groups do at 5, where two fit.
    assert fresh_to_take(Counter([6, 6]), Counter([5, 5, 5]), 0, version=4, rules=rules(2, 2)) is None
    assert overfull_deadline(Counter([6, 6]), Counter([5, 5, 5]), version=4, rules=rules(2, 2)) == 5
    assert fresh_to_take(Counter([6, 6, 5]), Counter([5, 5]), 0, version=4, rules=rules(2, 2)) == 2


def test_used_groups_fill_a_batch_up_as_far_as_fresh_ones_can_wait() -> None:
    half = rules(2, 4, fresh=2)
    assert fresh_to_take(Counter([6, 6, 6]), Counter([]), 9, version=4, rules=half) == 2
    assert fresh_to_take(Counter([6, 6, 6]), Counter([]), 1, version=4, rules=half) == 3  # there is only one used group
    assert fresh_to_take(Counter([6, 6, 6]), Counter([]), 0, version=4, rules=half) is None
    assert fresh_to_take(Counter([4, 4, 4]), Counter([]), 9, version=4, rules=half) == 3  # all three expire now
    # Two of five fit into the next batch.
    assert fresh_to_take(Counter([5, 5, 5]), Counter([5, 5]), 9, version=4, rules=half) == 3


def test_dropping_and_masking_wait_for_nobody_that_runs() -> None:
    assert Drop(rules(2, 2)).num_fresh(Counter([6, 6]), Counter([4, 4]), 0, version=4) == 2
    assert Drop(rules(2, 3, fresh=1)).num_fresh(Counter([4, 4, 6]), Counter([]), 9, version=4) == 2
    assert Mask(rules(2, 2)).num_fresh(Counter([6, 6]), Counter([4, 4]), 0, version=4) == 2
    assert Mask(rules(2, 2)).num_fresh(Counter([6]), Counter([]), 0, version=4) is None


def test_a_masked_group_lasts_as_long_as_its_newest_token() -> None:
    row = StoredGroup(group_id=0, prompt_index=0, start_version=3, worker="", arrival=make_arrival(newest_version=5))
    assert Wait(rules(2, 1)).deadline(row) == 5
    assert Mask(rules(2, 1)).deadline(row) == 7
    assert young_enough(np.array([1, 2, 3, 5], np.int32), 5, 2).tolist() == [False, False, True, True]


def test_exact_mode_fills_the_lowest_vacant_batches() -> None:
    assert vacant_batches(Counter({4: 2, 5: 1, 6: 3}), 6, first_batch=4, rules=rules(3, 3)) == [4, 5, 5, 7, 7, 7]
    assert [exact_start_version(batch, 2, 0) for batch in range(5)] == [0, 0, 0, 1, 2]
    assert [exact_start_version(batch, 2, 3) for batch in range(3, 8)] == [3, 3, 3, 4, 5]


@dataclass(frozen=True)
class State:
    """A state relative to the learner's version v: numbers of running and finished groups by age, v - start_version."""

    behind: int  # v - p
    unserved: int  # fresh groups of the batches that are trained and not served
    held: int  # fresh groups of the batch that the learner holds; 0: it holds none
    running: tuple[int, ...]
    finished: tuple[int, ...]


def ages(counts: Iterable[int]) -> list[int]:
    return [age for age, n in enumerate(counts) for _ in range(n)]


Take = Callable[[Counter[int], Counter[int], int, int, Rules], int | None]


def fresh_of(state: State, reusable: int, rules: Rules, take: Take) -> int | None:
    bound = rules.max_staleness
    finished, running = (Counter(bound - age for age in ages(each)) for each in (state.finished, state.running))
    return take(finished, running, reusable, 0, rules)


def step(counts: tuple[int, ...], age: int, by: int) -> tuple[int, ...]:
    return (*counts[:age], counts[age] + by, *counts[age + 1 :])


def capacity(state: State, rules: Rules) -> int:
    held = sum(state.running) + sum(state.finished) + state.unserved + state.held
    return admission_capacity(held, rules.slots)


def successors(state: State, rules: Rules, every_steps: int, take: Take) -> Iterator[State]:
    if capacity(state, rules):
        yield replace(state, running=step(state.running, state.behind, 1))
    for age, n in enumerate(state.running):
        if n:
            fewer = replace(state, running=step(state.running, age, -1))
            yield fewer
            yield replace(fewer, finished=step(state.finished, age, 1))
    if state.held:
        # Trained: everything left is a version older. A group past its deadline would have age bound + 1.
        assert state.running[-1] == state.finished[-1] == 0, "missed its deadline"
        older = ((0, *state.running[:-1]), (0, *state.finished[:-1]))
        yield State(state.behind + 1, state.unserved + state.held, 0, *older)
    elif state.behind == every_steps:
        yield replace(state, behind=0, unserved=0)
    else:
        for reusable in range(rules.prompts_per_step - rules.fresh_per_step + 1):
            if (fresh := fresh_of(state, reusable, rules, take)) is not None:
                finished = state.finished
                for age in sorted(ages(finished), reverse=True)[:fresh]:
                    finished = step(finished, age, -1)
                yield replace(state, held=fresh, finished=finished)


def assert_no_deadlock(state: State, rules: Rules, every_steps: int, take: Take) -> None:
    """Once every group that may run has finished, the learner gets its batch, even without used groups."""
    if not state.held and state.behind < every_steps:
        done = tuple(r + f for r, f in zip(state.running, state.finished, strict=True))
        done = step(done, state.behind, capacity(state, rules))
        nobody = (0,) * (rules.max_staleness + 1)
        assert fresh_of(replace(state, running=nobody, finished=done), 0, rules, take) is not None, state


def every_state(rules: Rules, every_steps: int, take: Take = fresh_to_take) -> set[State]:
    """Every reachable state of a small buffer, all orders of admit, finish, drop, take, train and serve."""
    nobody = (0,) * (rules.max_staleness + 1)
    frontier = [State(0, 0, 0, nobody, nobody)]
    seen = set(frontier)
    while frontier:
        state = frontier.pop()
        assert_no_deadlock(state, rules, every_steps, take)
        for following in successors(state, rules, every_steps, take):
            if following not in seen:
                seen.add(following)
                frontier.append(following)
    return seen


SMALL = pytest.mark.parametrize(
    ("bound", "size", "fresh", "every_steps"),
    [
        (0, 4, 4, 1), (1, 1, 1, 1), (1, 3, 3, 2), (2, 2, 2, 1), (2, 2, 2, 3), (2, 3, 3, 2), (2, 4, 4, 1), (3, 2, 2, 1),
        (3, 2, 2, 2), (4, 1, 1, 3), (1, 4, 2, 1), (2, 3, 1, 1), (2, 4, 3, 2), (3, 3, 2, 2), (3, 2, 1, 2),
    ],
)
@SMALL
def test_no_order_of_events_breaks_the_bound_or_stops_the_learner(
    bound: int, size: int, fresh: int, every_steps: int
) -> None:
    seen = every_state(rules(bound, size, fresh), every_steps)
    assert max(sum(state.running) + sum(state.finished) for state in seen) == (bound + 1) * fresh


@SMALL
def test_nor_with_any_number_of_slots_that_the_bound_allows(
    bound: int, size: int, fresh: int, every_steps: int
) -> None:
    for slots in range(every_steps * size, (bound + 1) * fresh):
        seen = every_state(rules(bound, size, fresh, slots=slots), every_steps)
        assert max(sum(state.running) + sum(state.finished) for state in seen) == slots


@pytest.mark.parametrize(("bound", "depth"), [(2, 0), (3, 0.5), (3, 1), (2, 1.5)])
def test_a_depth_holds_fewer_groups_and_leaves_them_the_time_of_the_bound(
    bound: int, depth: float
) -> None:
    seen = every_state(rules(bound, 2, slots=int((depth + 1) * 2)), 1)
    live = [(state.running, state.finished) for state in seen]
    assert max(sum(running) + sum(finished) for running, finished in live) == (depth + 1) * 2
    oldest = max(age for running, finished in live for age, n in enumerate(finished) if n)
    assert oldest == (bound if depth else 0), "at depth 0 every group is of the newest version"


def test_that_search_finds_the_flaw_of_a_rule_without_look_ahead() -> None:
    def today_only(finished, running, reusable, version, rules):  # type: ignore[no-untyped-def]
        enough = finished.total() >= rules.prompts_per_step and all(d > version for d in running)
        return rules.prompts_per_step if enough else None

    # Two groups that expire together, of which one batch could hold only one, are noticed too late.
    with pytest.raises(AssertionError, match="missed its deadline"):
        every_state(rules(2, 1), 1, today_only)


def test_that_search_finds_a_deadlock_where_slots_are_too_few() -> None:
    """S >= E B is needed: one slot fewer for two batches between pushes, and the learner waits for ever."""
    with pytest.raises(AssertionError, match="State"):
        every_state(rules(2, 3, slots=5), 2)
