from __future__ import annotations

from collections import Counter

import pytest

from buffer.staleness import admission_capacity, choose_batch, deadline, overfull_deadline


def test_capacity_is_bound_plus_one_batches_less_what_is_held() -> None:
    assert admission_capacity(slots_held=0, max_staleness=0, prompts_per_step=16) == 16
    assert admission_capacity(slots_held=40, max_staleness=2, prompts_per_step=16) == 8
    assert admission_capacity(slots_held=48, max_staleness=2, prompts_per_step=16) == 0


def test_the_earliest_deadlines_go_first_and_ties_by_id() -> None:
    finished = [(5, 9), (4, 7), (5, 3), (6, 1)]
    assert choose_batch(finished, [], version=4, max_staleness=2, prompts_per_step=2) == [3, 7]


def test_a_batch_waits_for_a_running_group_that_expires_with_it() -> None:
    finished = [(6, 1), (6, 2)]
    assert choose_batch(finished, [5], version=4, max_staleness=2, prompts_per_step=2) == [1, 2]
    assert choose_batch(finished, [4], version=4, max_staleness=2, prompts_per_step=2) is None


def test_a_batch_waits_when_the_next_one_could_not_hold_all_that_expire_then() -> None:
    # Nothing expires at version 4, but three groups do at 5, where two fit.
    finished, running = [(6, 1), (6, 2)], [5, 5, 5]
    assert choose_batch(finished, running, version=4, max_staleness=2, prompts_per_step=2) is None
    assert choose_batch([*finished, (5, 3)], running[:2], version=4, max_staleness=2, prompts_per_step=2) == [1, 3]


def test_the_overfull_deadline_is_the_first_of_them() -> None:
    assert overfull_deadline([7, 7, 8], version=6, max_staleness=2, prompts_per_step=2) is None
    assert overfull_deadline([7, 7, 7, 8, 8], version=6, max_staleness=2, prompts_per_step=2) == 7
    assert overfull_deadline([6, 7], version=6, max_staleness=2, prompts_per_step=2) == 6


# A state seen from the learner's version v: how far the served version is behind, whether the learner holds a batch,
# and how many groups of each age v - start_version run and are finished.
State = tuple[int, bool, tuple[int, ...], tuple[int, ...]]


def chosen_ages(state: State, bound: int, size: int) -> list[int] | None:
    _, _, running, finished = state
    ages = [age for age, n in enumerate(finished) for _ in range(n)]
    batch = choose_batch(
        [(deadline(-age, bound), i) for i, age in enumerate(ages)],
        [deadline(-age, bound) for age, n in enumerate(running) for _ in range(n)],
        0,
        bound,
        size,
    )
    return None if batch is None else [ages[i] for i in batch]


def step(counts: tuple[int, ...], age: int, by: int) -> tuple[int, ...]:
    return (*counts[:age], counts[age] + by, *counts[age + 1 :])


def successors(state: State, bound: int, size: int, every_steps: int) -> list[State]:
    behind, held, running, finished = state
    following: list[State] = []
    if capacity(state, bound, size):
        following.append((behind, held, step(running, behind, 1), finished))
    for age, n in enumerate(running):
        if n:
            fewer = step(running, age, -1)
            following += [(behind, held, fewer, step(finished, age, 1)), (behind, held, fewer, finished)]
    if held:
        # Trained: everything left is a version older. A group past its deadline would have age bound + 1.
        assert running[bound] == finished[bound] == 0, "missed its deadline"
        older = ((0, *running[:-1]), (0, *finished[:-1]))
        following.append((behind + 1, False, *older))
    elif behind == every_steps:
        following.append((0, False, running, finished))
    elif (ages := chosen_ages(state, bound, size)) is not None:
        for age, n in Counter(ages).items():
            finished = step(finished, age, -n)
        following.append((behind, True, running, finished))
    return following


def capacity(state: State, bound: int, size: int) -> int:
    behind, held, running, finished = state
    return admission_capacity(sum(running) + sum(finished) + (behind + held) * size, bound, size)


def assert_no_deadlock(state: State, bound: int, size: int, every_steps: int) -> None:
    """Once all that may run has run, the learner gets its batch."""
    behind, held, running, finished = state
    if not held and behind < every_steps:
        done = tuple(r + f for r, f in zip(running, finished, strict=True))
        done = step(done, behind, capacity(state, bound, size))
        assert chosen_ages((behind, held, (0,) * (bound + 1), done), bound, size) is not None, state


@pytest.mark.parametrize(
    ("bound", "size", "every_steps"),
    [(0, 4, 1), (1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 2, 3), (2, 3, 2), (2, 4, 1), (3, 2, 1), (3, 2, 2), (4, 1, 3)],
)
def test_no_order_of_events_breaks_the_bound_or_stops_the_learner(bound: int, size: int, every_steps: int) -> None:
    """Every reachable state of a small buffer, all orders of admit, finish, fail, take, train and serve."""
    start: State = (0, False, (0,) * (bound + 1), (0,) * (bound + 1))
    seen, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        assert_no_deadlock(state, bound, size, every_steps)
        for following in successors(state, bound, size, every_steps):
            if following not in seen:
                seen.add(following)
                frontier.append(following)
    assert max(sum(running) + sum(finished) for _, _, running, finished in seen) == (bound + 1) * size


def test_that_search_finds_the_flaw_of_a_rule_without_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def today_only(finished, running, version, bound, size):  # type: ignore[no-untyped-def]
        chosen = sorted(finished)[:size]
        return [i for _, i in chosen] if len(chosen) == size and all(d > version for d in running) else None

    monkeypatch.setitem(globals(), "choose_batch", today_only)
    # Two groups that expire together, of which one batch could hold only one, are noticed too late.
    with pytest.raises(AssertionError, match="missed its deadline"):
        test_no_order_of_events_breaks_the_bound_or_stops_the_learner(2, 1, 1)
