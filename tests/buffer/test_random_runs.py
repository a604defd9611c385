"""Random runs of the store in every mode and with every policy, checked by an onlooker who knows none of its rules."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from benchmarks.simulate import Workload, simulate
from buffer.staleness import Rules
from tests.buffer.factories import plain_rules
from tests.buffer.model_checker import EVERYTHING, WORKERS, Onlooker, some_onlooker, walk

BOUNDS = [(bound, every) for bound in range(5) for every in range(1, bound + 2)]


@pytest.mark.parametrize(("max_staleness", "every_steps"), BOUNDS)
def test_a_long_random_run_keeps_the_bound_and_the_account_and_never_stops(
    max_staleness: int, every_steps: int
) -> None:
    onlooker = Onlooker(plain_rules(max_staleness, 5), every_steps)
    walk(onlooker, 2500, random.Random(7 * max_staleness + every_steps), resumes=False)
    assert onlooker.version > 30
    assert onlooker.oldest_trained == max_staleness, "a bound that is never reached was not tried"


@pytest.mark.parametrize(
    "rules",
    [
        plain_rules(2, 4, late="drop"), plain_rules(2, 4, late="mask"), plain_rules(3, 4, exact=True, drain=True),
        plain_rules(0, 4, exact=True, drain=True), plain_rules(2, 4, drain=True),
        plain_rules(3, 4, max_uses=2, fresh_per_step=2),
        plain_rules(3, 4, max_uses=3, fresh_per_step=3, late="mask"),
        plain_rules(2, 4, max_uses=2, fresh_per_step=2, late="drop"),
    ],
    ids=lambda rules: f"{rules.late}-exact{rules.exact}-drain{rules.drain}-uses{rules.max_uses}",
)
def test_every_mode_and_policy_shows_what_it_is_for(rules: Rules) -> None:
    onlooker = Onlooker(rules, every_steps=1)
    walk(onlooker, 4000, random.Random(1), resumes=False)
    assert onlooker.version > 50
    assert onlooker.oldest_trained == rules.max_staleness
    assert (onlooker.drops["late"] > 0) == (rules.late != "wait")
    assert onlooker.drops["zero_variance"] > 0
    assert max(map(len, onlooker.uses.values())) == rules.max_uses
    if rules.exact:
        ages = {v: {v - onlooker.starts[i] for i, used in onlooker.uses.items() if v in used} for v in range(20)}
        assert ages == {v: {min(v, rules.max_staleness)} for v in range(20)}


def test_random_rules_with_crashes_and_resumes_keep_the_bound_and_the_account() -> None:
    crashes: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(seed)
        with some_onlooker(rng) as onlooker:
            walk(onlooker, 500, rng)
            crashes["through a file" if onlooker.files else "in memory"] += onlooker.crashes
            crashes["groups kept by a resume"] += onlooker.kept
    assert min(crashes.values()) > 5, crashes


class AnyOrder(RuleBasedStateMachine):
    """The same events in the orders that hypothesis thinks of, and shrinks to the shortest that fails."""

    steps: ClassVar[Counter[str]] = Counter()

    @initialize(seed=st.integers(0, EVERYTHING))
    def open(self, seed: int) -> None:
        self.files = ExitStack()
        self.onlooker = self.files.enter_context(some_onlooker(random.Random(seed)))

    @rule(count=st.integers(1, 20), worker=st.sampled_from(WORKERS))
    def admit(self, count: int, worker: str) -> None:
        self.onlooker.admit(count, worker)

    @rule(count=st.integers(1, 20), pick=st.integers(0, EVERYTHING), age=st.integers(0, 4))
    def finish(self, count: int, pick: int, age: int) -> None:
        self.onlooker.finish(count, pick, self.onlooker.version - age)

    @rule(pick=st.integers(0, EVERYTHING))
    def finish_with_equal_rewards(self, pick: int) -> None:
        self.onlooker.finish(1, pick, self.onlooker.version, equal=True)

    @rule(pick=st.integers(0, EVERYTHING), requeue=st.booleans())
    def fail(self, pick: int, requeue: bool) -> None:
        self.onlooker.fail(pick, requeue)

    @rule(worker=st.sampled_from(WORKERS))
    def abandon(self, worker: str) -> None:
        self.onlooker.abandon(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def hear(self, worker: str) -> None:
        self.onlooker.hear(worker)

    @rule(events=st.integers(1, 3))
    def learn(self, events: int) -> None:
        """Take, train (publish), serve (release), whichever is next."""
        for _ in range(events):
            self.onlooker.learn()

    @rule()
    def crash_and_restore(self) -> None:
        self.onlooker.crash()

    @rule(back=st.integers(0, 4))
    def resume(self, back: int) -> None:
        self.onlooker.resume(back)

    @rule()
    def run_dry(self) -> None:
        self.onlooker.run_dry()

    @invariant()
    def the_account_holds(self) -> None:
        if hasattr(self, "onlooker"):
            self.onlooker.check()
            AnyOrder.steps["all"] += 1

    def teardown(self) -> None:
        if hasattr(self, "onlooker"):
            rules = self.onlooker.rules
            kind = "exact" if rules.exact else rules.late + (" with replay" if rules.max_uses > 1 else "")
            AnyOrder.steps[kind + (" with drain" if rules.drain else "")] += self.onlooker.num_events
            AnyOrder.steps["batches"] += self.onlooker.version
            if self.onlooker.files:
                AnyOrder.steps["with a journal"] += self.onlooker.num_events
                AnyOrder.steps["crashes restored from a file"] += self.onlooker.crashes
            self.files.close()


def run_in_any_order(runs: int, events: int) -> Counter[str]:
    AnyOrder.steps.clear()
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=runs, stateful_step_count=events, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    return AnyOrder.steps


def test_events_in_any_order_keep_the_bound_and_the_account() -> None:
    assert run_in_any_order(runs=80, events=50)["all"] >= 3000


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_hundred_thousand_events_in_any_order_keep_the_bound_and_the_account() -> None:
    steps = run_in_any_order(runs=1200, events=100)
    walked = 0
    for seed in range(300):
        rng = random.Random(seed)
        with some_onlooker(rng) as onlooker:
            walk(onlooker, 2000, rng)
            walked += onlooker.num_events
    print(f"\nhypothesis state machine: {dict(steps)}\nrandom walks: {walked} events")
    assert steps["all"] >= 100_000


CROWDED = Workload(concurrency=256, prompts_per_step=64, train_s=2.0)


@pytest.mark.parametrize(("max_staleness", "every_steps"), [(0, 1), (1, 1), (1, 2), (3, 1), (4, 3)])
def test_four_batches_in_flight_keep_the_bound(max_staleness: int, every_steps: int) -> None:
    workload = Workload(concurrency=256, prompts_per_step=64, train_s=2.0, every_steps=every_steps)
    assert simulate(workload, max_staleness, steps=60).max_staleness == max_staleness


def test_four_batches_in_flight_break_a_rule_that_looks_only_at_today(monkeypatch: pytest.MonkeyPatch) -> None:
    def today_only(finished, running, reusable, version, rules):  # type: ignore[no-untyped-def]
        enough = len(finished) >= rules.prompts_per_step and all(d > version for d in running)
        return rules.prompts_per_step if enough else None

    monkeypatch.setattr("buffer.store.fresh_to_take", today_only)
    with pytest.raises(Exception, match=r"over staleness.max = 3"):
        simulate(CROWDED, 3, steps=60)


@pytest.mark.parametrize(
    ("late", "cv", "expected"),
    [
        ("wait", 1.0, [0.19, 0.34, 0.47, 0.66, 0.88]),
        ("wait", 0.3, [0.39, 0.74, 0.94, 0.95, 0.95]),
        ("drop", 0.3, [0.39, 0.74, 0.94, 0.95, 0.95]),  # cv 1: test_dropping.py
    ],
)
def test_the_simulated_learner_is_as_busy_as_designed(late: str, cv: float, expected: list[float]) -> None:
    """Figures of the design for bounds 0, 1, 2, 4, 8; they vary with the seed, so the mean of four is compared."""
    workload = Workload(group_cv=cv, late=late)  # type: ignore[arg-type]
    for bound, design in zip((0, 1, 2, 4, 8), expected, strict=True):
        found = np.mean([simulate(workload, bound, 100, seed).utilisation for seed in range(4 if cv == 1 else 2)])
        assert abs(found - design) <= 0.03, (bound, found)
