"""Random runs of the store, checked by a model that knows nothing of its rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.simulate import Workload, simulate
from buffer.store import Store, Taken

COUNTS = st.integers(1, 40)
PICKS = st.integers(0, 10**6)


class RandomRun(RuleBasedStateMachine):
    """Events in any order; `self.starts` holds what a group's oldest token can be."""

    @initialize(max_staleness=st.integers(0, 4), prompts_per_step=st.integers(1, 5), data=st.data())
    def open(self, max_staleness: int, prompts_per_step: int, data: Any) -> None:
        self.max_staleness, self.size = max_staleness, prompts_per_step
        self.every_steps = data.draw(st.integers(1, max_staleness + 1))
        self.store = Store(max_staleness, prompts_per_step)
        self.store.served(0)
        self.version = self.served_version = self.dropped = self.admitted = 0
        self.starts: dict[int, int] = {}
        self.workers: dict[int, str] = {}
        self.running: list[int] = []
        self.batch: Taken | None = None
        self.used: set[int] = set()
        self.to_requeue: list[int] = []
        self.prompts: dict[int, int] = {}

    @rule(count=COUNTS, worker=st.sampled_from(["rollout/0", "rollout/1"]))
    def admit(self, count: int, worker: str) -> None:
        for slot in self.store.admit(worker, count, now_s=0.0):
            assert slot.group_id == self.admitted and slot.start_version == self.served_version
            if self.to_requeue:
                assert slot.prompt_index == self.to_requeue.pop(0)
            self.admitted += 1
            self.starts[slot.group_id], self.prompts[slot.group_id] = slot.start_version, slot.prompt_index
            self.workers[slot.group_id] = worker
            self.running.append(slot.group_id)

    @precondition(lambda self: self.running)
    @rule(count=COUNTS, pick=PICKS)
    def finish_some(self, count: int, pick: int) -> None:
        for _ in range(min(count, len(self.running))):
            self.store.finish(self.running.pop(pick % len(self.running)), b"")

    @precondition(lambda self: self.running)
    @rule(pick=PICKS, requeue=st.booleans())
    def fail(self, pick: int, requeue: bool) -> None:
        group_id = self.running.pop(pick % len(self.running))
        self.store.fail(group_id, "test", requeue)
        self.dropped += 1
        if requeue:
            self.to_requeue.append(self.prompts[group_id])

    @rule()
    def abandon(self) -> None:
        lost = [group_id for group_id in self.running if self.workers[group_id] == "rollout/1"]
        assert self.store.abandon("rollout/1") == len(lost)
        self.running = [group_id for group_id in self.running if group_id not in lost]
        self.dropped += len(lost)
        self.to_requeue += [self.prompts[group_id] for group_id in sorted(lost)]

    @precondition(lambda self: self.batch is None and self.version - self.served_version < self.every_steps)
    @rule()
    def take(self) -> None:
        self.batch = self.store.take(self.version)
        if self.batch:
            ids = [group.slot.group_id for group in self.batch.groups]
            assert len(ids) == self.size and ids == sorted(ids)
            assert not self.used & set(ids), "trained twice"
            assert all(self.version - self.starts[i] <= self.max_staleness for i in ids), "bound"
            self.used |= set(ids)

    @precondition(lambda self: self.batch is not None)
    @rule()
    def train(self) -> None:
        self.version += 1
        self.store.trained(self.version)
        self.batch = None

    @precondition(lambda self: self.batch is None and self.version - self.served_version == self.every_steps)
    @rule()
    def serve(self) -> None:
        self.served_version = self.version
        self.store.served(self.version)

    @precondition(lambda self: self.batch is None and self.version - self.served_version < self.every_steps)
    @rule()
    def once_all_that_may_run_has_run_there_is_a_batch(self) -> None:
        self.admit(10**6, "rollout/0")
        self.finish_some(10**6, 0)
        self.take()
        assert self.batch is not None, "deadlock"

    @invariant()
    def the_account_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_identity()
        counters = self.store.counters()
        assert counters["buffer/admitted"] == self.admitted
        assert counters["buffer/dropped_failed"] == self.dropped
        assert counters["buffer/running"] == len(self.running)
        assert counters["buffer/trained"] + counters["buffer/held"] == len(self.used)
        assert counters["buffer/slots_held"] <= (self.max_staleness + 1) * self.size


def run_randomly(runs: int, events: int) -> None:
    run_state_machine_as_test(
        RandomRun,
        settings=settings(
            max_examples=runs, stateful_step_count=events, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_random_runs_keep_the_bound_and_the_account_and_never_stop() -> None:
    run_randomly(runs=60, events=50)


@pytest.mark.nightly
def test_many_long_random_runs_keep_the_bound_and_the_account_and_never_stop() -> None:
    run_randomly(runs=2000, events=200)


CROWDED = Workload(concurrency=256, prompts_per_step=64, train_s=2.0)


@pytest.mark.parametrize(("max_staleness", "every_steps"), [(0, 1), (1, 1), (1, 2), (3, 1), (4, 3)])
def test_four_batches_in_flight_keep_the_bound(max_staleness: int, every_steps: int) -> None:
    workload = Workload(concurrency=256, prompts_per_step=64, train_s=2.0, every_steps=every_steps)
    assert simulate(workload, max_staleness, steps=60).max_staleness == max_staleness


def test_four_batches_in_flight_break_a_rule_that_looks_only_at_today(monkeypatch: pytest.MonkeyPatch) -> None:
    def today_only(finished, running, version, max_staleness, size):  # type: ignore[no-untyped-def]
        chosen = sorted(finished)[:size]
        waits = len(chosen) < size or any(d <= version for d in running)
        return None if waits else sorted(i for _, i in chosen)

    monkeypatch.setattr("buffer.store.choose_batch", today_only)
    with pytest.raises(Exception, match=r"over staleness.max = 3"):
        simulate(CROWDED, 3, steps=60)


@pytest.mark.parametrize(
    ("cv", "expected"), [(1.0, [0.19, 0.34, 0.47, 0.66, 0.88]), (0.3, [0.39, 0.74, 0.94, 0.95, 0.95])]
)
def test_the_simulated_learner_is_as_busy_as_designed(cv: float, expected: list[float]) -> None:
    """Figures of the design for bounds 0, 1, 2, 4, 8; they vary with the seed, so the mean of four is compared."""
    bounds = (0, 1, 2, 4, 8)
    workload = Workload(group_cv=cv)
    found = [np.mean([simulate(workload, b, 100, seed).utilisation for seed in range(4)]) for b in bounds]
    assert np.abs(np.array(found) - expected).max() <= 0.03, found
