"""Random runs of the store in every mode and with every policy, checked by a model that knows none of its rules."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from buffer.staleness import Rules
from tests.kit.buffer.arrivals import plain_rules
from tests.kit.buffer.model_checker import EVERYTHING, WORKERS, ModelChecker, random_checker, walk

pytestmark = pytest.mark.processes  # together they compute for long

BOUNDS = [(bound, every) for bound in range(5) for every in range(1, bound + 2)]


@pytest.mark.parametrize(("max_staleness", "every_steps"), BOUNDS)
def test_a_long_random_run_keeps_the_bound_and_never_stops(
    max_staleness: int, every_steps: int
) -> None:
    checker = ModelChecker(plain_rules(max_staleness, 5, every_steps=every_steps))
    walk(checker, 1500, random.Random(7 * max_staleness + every_steps), resumes=False)
    assert checker.version > 30
    assert checker.oldest_trained == max_staleness, "a bound that is never reached was not tried"


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
def test_every_mode_and_policy_has_its_effect(rules: Rules) -> None:
    checker = ModelChecker(rules)
    walk(checker, 2500, random.Random(1), resumes=False)
    assert checker.version > 50
    assert checker.oldest_trained == rules.max_staleness
    assert (checker.drops["late"] > 0) == (rules.late != "wait")
    assert checker.drops["zero_variance"] > 0
    assert max(map(len, checker.uses.values())) == rules.max_uses
    if rules.exact:
        ages = {v: {v - checker.starts[i] for i, used in checker.uses.items() if v in used} for v in range(20)}
        assert ages == {v: {min(v, rules.max_staleness)} for v in range(20)}


def test_random_rules_with_crashes_and_resumes_keep_the_bound() -> None:
    crashes: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(seed)
        with random_checker(rng) as checker:
            walk(checker, 500, rng)
            crashes["through a file" if checker.files else "in memory"] += checker.crashes
            crashes["groups kept by a resume"] += checker.kept
    assert min(crashes.values()) > 5, crashes


class AnyOrder(RuleBasedStateMachine):
    """The same events in the orders that hypothesis draws, and shrinks to the shortest one that fails."""

    steps: ClassVar[Counter[str]] = Counter()

    @initialize(seed=st.integers(0, EVERYTHING))
    def open(self, seed: int) -> None:
        self.files = ExitStack()
        self.checker = self.files.enter_context(random_checker(random.Random(seed)))

    @rule(count=st.integers(1, 20), worker=st.sampled_from(WORKERS))
    def admit(self, count: int, worker: str) -> None:
        self.checker.admit(count, worker)

    @rule(count=st.integers(1, 20), pick=st.integers(0, EVERYTHING), age=st.integers(0, 4))
    def finish(self, count: int, pick: int, age: int) -> None:
        self.checker.finish(count, pick, self.checker.version - age)

    @rule(pick=st.integers(0, EVERYTHING))
    def finish_with_equal_rewards(self, pick: int) -> None:
        self.checker.finish(1, pick, self.checker.version, equal=True)

    @rule(pick=st.integers(0, EVERYTHING), requeue=st.booleans())
    def fail(self, pick: int, requeue: bool) -> None:
        self.checker.fail(pick, requeue)

    @rule(worker=st.sampled_from(WORKERS))
    def abandon(self, worker: str) -> None:
        self.checker.abandon(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def acknowledge_aborts(self, worker: str) -> None:
        self.checker.acknowledge_aborts(worker)

    @rule(events=st.integers(1, 3))
    def learn(self, events: int) -> None:
        """Take, train (publish), serve (release), whichever is next."""
        for _ in range(events):
            self.checker.learn()

    @rule()
    def crash_and_restore(self) -> None:
        self.checker.crash()

    @rule(back=st.integers(0, 4))
    def resume(self, back: int) -> None:
        self.checker.resume(back)

    @rule()
    def run_dry(self) -> None:
        self.checker.run_dry()

    @invariant()
    def the_accounting_holds(self) -> None:
        if hasattr(self, "checker"):
            self.checker.check()
            AnyOrder.steps["all"] += 1

    def teardown(self) -> None:
        if hasattr(self, "checker"):
            rules = self.checker.rules
            kind = "exact" if rules.exact else rules.late + (" with replay" if rules.max_uses > 1 else "")
            AnyOrder.steps[kind + (" with drain" if rules.drain else "")] += self.checker.num_events
            AnyOrder.steps["batches"] += self.checker.version
            if self.checker.files:
                AnyOrder.steps["with a journal"] += self.checker.num_events
                AnyOrder.steps["crashes restored from a file"] += self.checker.crashes
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


def test_events_in_any_order_keep_the_bound_and_the_accounting() -> None:
    assert run_in_any_order(runs=60, events=50)["all"] >= 2000


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_hundred_thousand_events_in_any_order_keep_the_bound() -> None:
    steps = run_in_any_order(runs=1200, events=100)
    walked = 0
    for seed in range(300):
        rng = random.Random(seed)
        with random_checker(rng) as checker:
            walk(checker, 2000, rng)
            walked += checker.num_events
    print(f"\nhypothesis state machine: {dict(steps)}\nrandom walks: {walked} events")
    assert steps["all"] >= 100_000
