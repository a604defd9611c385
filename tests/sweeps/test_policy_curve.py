"""The reward of policies without the lag of the batches that show it: made-up runs give back the curves they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.tools.sweeps.efficiency import effective_steps, why_unknown
from async_rl.tools.sweeps.policy_curve import LAST_BUCKET, PolicyPoint, evaluations_of, policy_curve
from async_rl.tools.sweeps.statistics import estimate
from learner.algorithms.diagnostics import BUCKETS, batch_metrics
from tests.kit.groups import batch_of, make_group, make_row

pytestmark = pytest.mark.processes  # together they compute for long

Step = dict[str, float | None]
Reward = Callable[[int, int], float]


def made_run(ages: Sequence[Mapping[int, float]], reward: Reward, step_s: float = 2.0) -> list[Step]:
    """The steps of a run whose batch v has ages[v][s] answers of staleness s, all with the reward (version, s)."""
    steps: list[Step] = []
    for batch, counts in enumerate(ages):
        step: Step = {"step": batch + 1.0, "time/since_first_step_s": batch * step_s, "time/step_s": step_s}
        buckets: dict[int, list[tuple[float, float]]] = {}
        for age, count in counts.items():
            step[f"staleness/episodes_{age}"] = count
            buckets.setdefault(min(age, 10), []).append((count, reward(batch - age, age)))
        for bucket, found in buckets.items():
            step[f"by_staleness/{bucket}/reward"] = sum(n * r for n, r in found) / sum(n for n, _ in found)
        every = [pair for found in buckets.values() for pair in found]
        step["reward/mean"] = sum(n * r for n, r in every) / sum(n for n, _ in every)
        steps.append(step)
    return steps


def always(staleness: int, batches: int) -> list[dict[int, float]]:
    """A run in which every batch is as old as it may be: the first ones have only version 0 to be from."""
    return [{min(staleness, batch): 64.0} for batch in range(batches)]


def saturating(version: float) -> float:
    return 0.9 - 0.6 * math.exp(-version / 8)


@pytest.mark.parametrize("staleness", [0, 1, 4, 9, 10, 13])
def test_a_run_at_one_staleness_gives_back_the_curve_of_its_policy(staleness: int) -> None:
    steps = made_run(always(staleness, 40), lambda version, _: saturating(version), step_s=1.5)
    curve = policy_curve(steps)
    assert [point.version for point in curve] == list(range(40 - staleness))
    assert [point.reward for point in curve] == pytest.approx([saturating(v) for v in range(40 - staleness)])
    served_s = [-1.5, *(1.5 * (v - 1) for v in range(1, 40 - staleness))]
    assert [point.served_s for point in curve] == pytest.approx(served_s)


@given(
    ages=st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 40), min_size=1), min_size=1, max_size=25),
    rewards=st.lists(st.floats(-1, 1), min_size=25, max_size=25),
)
def test_whichever_batches_the_answers_are_in_their_version_gets_them(
    ages: list[dict[int, int]], rewards: list[float]
) -> None:
    """Each version's answers all have one reward, so that it must come back exactly, with their number."""
    possible = [
        {min(age, batch): float(count) for age, count in counts.items()} for batch, counts in enumerate(ages)
    ]
    curve = policy_curve(made_run(possible, lambda version, _: rewards[version]))
    largest = max(age for counts in possible for age in counts)
    counts: dict[int, float] = {}
    for batch, found in enumerate(possible):
        for age, count in found.items():
            counts[batch - age] = counts.get(batch - age, 0.0) + count
    known = {version: count for version, count in sorted(counts.items()) if version + largest < len(possible)}
    assert {point.version: point.episodes for point in curve} == known
    assert [point.reward for point in curve] == pytest.approx([rewards[version] for version in known])


def test_a_run_without_steps_or_without_rewards_by_staleness_has_no_curve() -> None:
    for steps in ([], [{"step": 1.0, "time/since_first_step_s": 0.0, "reward/mean": 0.5}]):
        assert policy_curve(steps) == ()


def test_the_keys_are_those_that_the_learner_writes() -> None:
    """A batch of version 14 with a row of versions 2 and 3, rewarded 1, and rows of versions 12 and 14."""
    rows = [make_row(2, version=version, reward=reward) for version, reward in ((2, 1.0), (12, 0.0), (14, 0.5))]
    rows[0].versions[1] = 3
    steps: list[Step] = [{"step": float(number), "time/since_first_step_s": number} for number in range(1, 28)]
    steps[14] |= {metric.key: metric.value for metric in batch_metrics(batch_of(make_group(0, rows=rows), version=14))}
    points = policy_curve(steps)
    assert [(point.version, point.reward, point.episodes) for point in points] == [
        (2, 1.0, 1.0), (12, 0.0, 1.0), (14, 0.5, 1.0),
    ]  # fmt: skip
    assert LAST_BUCKET == BUCKETS - 1


def test_a_run_that_went_on_from_a_checkpoint_has_the_curve_of_one_without_that_step() -> None:
    """The clock of its steps begins again at 0 with step 11, of which no time is known."""
    steps = made_run(always(1, 20), lambda version, _: saturating(version))
    whole = policy_curve(steps)
    for number, step in enumerate(steps[10:]):
        step["time/since_first_step_s"] = 2.0 * number
    resumed = policy_curve(steps)
    assert [(point.version, point.reward) for point in resumed] == [
        (point.version, point.reward) for point in whole
    ]
    later_s = [whole[at].served_s - resumed[at].served_s for at in range(19)]
    assert later_s == pytest.approx([0.0] * 11 + [2.0] * 8)


def test_spans_of_versions_get_longer_as_the_run_goes_on() -> None:
    ages = [{0: 1.0 if batch == 4 else 3.0} for batch in range(14)]
    found = evaluations_of(policy_curve(made_run(ages, lambda version, _: float(version))))
    means = [0, 1, 2, 3, (4 + 3 * 5) / 4, 7, 10.5, 13]  # version 4 has a third of the answers of 5
    assert found == [(pytest.approx(mean), pytest.approx(mean)) for mean in means]


def noisy(rng: np.random.Generator, staleness: int, e: float, batches: int) -> tuple[PolicyPoint, ...]:
    """A run of 64 answers a batch that are right or wrong, and whose policy learns at `e` of the speed."""
    return policy_curve(
        made_run(always(staleness, batches), lambda version, _: rng.binomial(64, saturating(e * version)) / 64)
    )


@pytest.mark.parametrize(("base", "deep", "e"), [(0, 4, 0.6), (1, 8, 0.8), (0, 1, 1.0)])
def test_sampled_rewards_tell_a_known_efficiency_with_its_error(base: int, deep: int, e: float) -> None:
    rng = np.random.default_rng(5)
    means, errors = [], []
    for _ in range(60):
        fresh = {str(seed): evaluations_of(noisy(rng, base, 1.0, 30)) for seed in range(5)}
        stale = {str(seed): evaluations_of(noisy(rng, deep, e, 60)) for seed in range(5)}
        assert why_unknown(list(fresh.values()), "reward") == ""
        found = effective_steps(stale, dict.fromkeys(stale, 10.0), list(fresh.items()), within=True)
        result = estimate(list(found[:, 0]))
        means.append(result.mean)
        errors.append(result.error)
    assert np.mean(means) == pytest.approx(e, abs=0.03)
    # Near e = 1 the last points lie where the fresh runs' curve ends: there the error is up to half too large.
    assert 0.75 < math.sqrt(np.mean(np.square(errors))) / np.std(means) < 1.6


def test_versions_beyond_those_of_the_fresh_runs_do_not_count() -> None:
    """The stale runs learn as fast until version 20, and then forget all: beyond that the fresh ones say nothing."""
    fresh = evaluations_of(policy_curve(made_run(always(0, 21), lambda version, _: saturating(version))))
    forgets = made_run(always(4, 60), lambda version, _: saturating(version) if version <= 18 else 0.0)
    stale = evaluations_of(policy_curve(forgets))
    (within,) = effective_steps({"0": stale}, {"0": 1.0}, [("0", fresh)], within=True)
    (beyond,) = effective_steps({"0": stale}, {"0": 1.0}, [("0", fresh)])
    assert within[0] == pytest.approx(1.0, abs=0.02) and beyond[0] < 0.7
