"""Each rule of the watcher fires where it should, and not where chance alone is at work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from async_rl.base.config.watch import RULES
from async_rl.run.watch.watcher import Finding, Watcher

LIMITS = {name: rule.limit for name, rule in RULES.items()}


def watcher(*names: str, **more: float) -> Watcher:
    return Watcher({name: LIMITS[name] for name in names or LIMITS}, group_size=8, **more)  # type: ignore[arg-type]


def step(**values: float) -> dict[str, float]:
    """The metrics of a step with 16 prompts, whose keys have a _ for the /."""
    known = {"batch/episodes": 128.0, "reward/mean": 0.5, "reward/std": 0.5}
    return known | {key.replace("_", "/", 1): value for key, value in values.items()}


def gold(mean: float, labels: float = 64.0, squared: float | None = None) -> dict[str, float]:
    """An evaluation with gold rewards of 0 and 1, unless `squared` is given."""
    return {"eval/gold": mean, "eval/gold_squared": mean if squared is None else squared, "eval/gold_labels": labels}


def run(watch: Watcher, records: Iterable[dict[str, float]], first: int = 1) -> list[Finding]:
    found = [watch.add(version, values) for version, values in enumerate(records, first)]
    return [each for each in found if each and each.new]


@pytest.mark.parametrize(
    ("rule", "key", "kept", "broken"),
    [
        ("ess", "offpolicy/ess", 0.3, 0.29), ("kl", "offpolicy/kl_behaviour_proximal", -0.1, -0.11),
        ("truncated", "offpolicy/truncated_fraction", 0.05, 0.06),
        ("mismatch", "parity/precision/mean_abs", 0.1, math.nan),
        ("policy_skipped", "policy/skipped_steps", 0.0, 1.0),
        ("critic_skipped", "critic/skipped_steps", 0.0, 1.0),
    ],
)  # fmt: skip
def test_a_rule_of_one_step_warns_while_it_is_broken(rule: str, key: str, kept: float, broken: float) -> None:
    watch = watcher()
    found = [watch.add(version, step() | {key: value}) for version, value in enumerate((kept, broken, broken, kept), 1)]
    assert [each.states[rule] for each in found if each] == [False, True, True, False]
    assert [rule in each.new for each in found if each] == [False, True, False, False]
    assert found[3] and found[3].over == {rule: 2} and not any(each.trouble for each in found if each)
    assert watch.sentence().startswith(f"Alarms: {rule} 2 times (")


def test_most_answers_cut_off_warn() -> None:
    (found,) = run(watcher("cut"), [step(response_truncated_fraction=0.95)] * 6)
    assert (found.version, found.new, found.trouble) == (5, ("cut",), ())


def noisy(means: Sequence[float], noise: float = 0.04) -> list[dict[str, float]]:
    """Steps with these mean rewards and the noise of a batch."""
    draw = np.random.default_rng(0).normal(0, noise, len(means))
    return [step(reward_mean=float(mean + each), staleness_mean=1.0) for mean, each in zip(means, draw, strict=True)]


def test_a_fall_of_the_reward_to_nothing_is_trouble_within_two_steps() -> None:
    rises = [0.3 + 0.4 * min(1.0, number / 50) for number in range(100)]
    (found,) = run(watcher("reward"), [*noisy(rises), *[step(reward_mean=0.0, reward_std=0.0)] * 5])
    assert found.version in (101, 102) and found.trouble == ("reward",)
    assert 40 <= found.back_to <= 98  # the answers of step 100 are of version 98


def test_the_noise_of_batches_is_no_fall() -> None:
    assert not run(watcher("reward"), noisy([0.35] * 1000, noise=0.1))


def test_a_clear_fall_counts_only_if_half_of_the_gain_is_lost() -> None:
    """Without noise: from .3 to .7, and then down by a little less and a little more than half of that."""
    tenths = (3, 3, 3, 3, 3, 4, 5, 6, 7, 7, 7, 7, 7)
    rises = [step(reward_mean=0.1 * number, reward_std=0.01) for number in tenths]
    for mean, is_fall in ((0.52, False), (0.48, True)):
        found = run(watcher("reward"), [*rises, *[step(reward_mean=mean, reward_std=0.01)] * 40])
        assert bool(found) == is_fall, mean


@pytest.mark.parametrize(("deviation", "is_fall"), [(0.50, True), (0.70, False)])
def test_without_a_gain_a_fall_counts_beyond_a_quarter_of_a_deviation(
    deviation: float, is_fall: bool
) -> None:
    """Down by .15: more than .50 / 4 = .125, less than .70 / 4 = .175. Thousands of answers have little noise."""
    many = {"batch/episodes": 1e5}
    levels = [0.35] * 20 + [0.20] * 10
    steps = [step(reward_mean=level, reward_std=deviation) | many for level in levels]
    assert bool(run(watcher("reward"), steps)) == is_fall


def test_of_equally_good_versions_the_newest_is_gone_back_to() -> None:
    at_best = [step(reward_mean=1.0, reward_std=0.0)] * 30
    (found,) = run(watcher("reward"), [*noisy([0.2] * 30), *at_best, *[step(reward_mean=0.0)] * 3])
    assert (found.version, found.back_to) == (61, 59)
    (found,) = run(watcher("gold"), [*[gold(1.0)] * 27, *[gold(0.5)] * 3], first=0)
    assert (found.version, found.back_to) == (27, 25)  # the middle of evaluations 24 to 26


def test_one_right_answer_of_192_against_none_is_one_standard_error() -> None:
    watch = watcher("gold")
    found = [watch.add(version, gold(mean)) for version, mean in enumerate((1 / 64, 0, 0, 0, 0, 0))]
    # 3 x 64 labels each: p = 1/384, sqrt(p (1 - p) 2 / 192) = .0052 = 1/192; less the chance of the best of 4/3 windows
    assert found[-1] and 0 < found[-1].measured["gold"].value < 1
    assert not any(each and each.new for each in found)


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.4])
def test_evaluations_of_a_policy_that_stands_make_no_trouble(rate: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        assert not run(watcher("gold"), [gold(float(each)) for each in rng.binomial(64, rate, 200) / 64])


def test_a_fall_of_gold_to_nothing_is_trouble_within_two_evaluations() -> None:
    rng = np.random.default_rng(0)
    rises = [float(each) for each in rng.binomial(64, np.linspace(0.2, 0.6, 40)) / 64]
    (found,) = run(watcher("gold"), [gold(mean) for mean in (*rises, 0.0, 0.0, 0.0)], first=0)
    assert found.version in (40, 41) and found.trouble == ("gold",) and 25 <= found.back_to < 40


def growing(kl: Sequence[float], reward: float = 0.01) -> list[dict[str, float]]:
    return [step(kl_reference=each, reward_mean=0.1 + reward * number) for number, each in enumerate(kl)]


def test_a_kl_that_grows_to_twice_its_average_while_the_reward_rises_is_trouble() -> None:
    doubles = [*[0.2] * 40, *[0.41] * 5]
    (found,) = run(watcher("reference_kl"), growing(doubles))
    assert (found.version, found.trouble, found.back_to) == (43, ("reference_kl",), 35)
    assert not run(watcher("reference_kl"), growing(doubles, reward=-0.001)), "the reward falls"
    assert not run(watcher("reference_kl"), growing([each / 4 for each in doubles])), "it is small"
    assert not run(watcher("reference_kl"), growing([0.05 * each for each in range(45)])), "as at the start of any run"
    assert not run(watcher("reference_kl"), growing([*[0.2] * 40, 3.0, 3.0, 0.2, 0.2, 0.2])), "two spikes"


def test_answers_that_repeat_themselves_go_back_to_the_newest_healthy_version() -> None:
    shares = [*[0.8] * 20, 0.7, 0.6, 0.5, 0.4, 0.3, *[0.1] * 5]
    (found,) = run(watcher("diversity"), [step(response_distinct_fraction=each) for each in shares])
    # steps 24 to 28 have .2 on average, below .3 of .8; 18 to 22 had .74, above .9 of it, and 19 to 23 had .68
    assert (found.version, found.trouble, found.back_to) == (28, ("diversity",), 21)


def test_where_there_are_gold_rewards_rules_without_them_only_warn() -> None:
    watch = watcher("gold", "diversity")
    run(watch, [gold(0.5)] * 3, first=0)
    (found,) = run(watch, [*[step(response_distinct_fraction=0.8)] * 5, *[step(response_distinct_fraction=0.1)] * 5])
    assert (found.new, found.trouble) == (("diversity",), ())


def test_a_rule_that_a_person_has_accepted_only_warns() -> None:
    watch = Watcher(LIMITS, 8, accepted=["diversity"])
    (found,) = run(watch, [*[step(response_distinct_fraction=0.8)] * 5, *[step(response_distinct_fraction=0.1)] * 5])
    assert (found.new, found.trouble) == (("diversity",), ())


def test_the_checkpoints_to_which_a_run_may_go_back_are_needed() -> None:
    watch = watcher(eval_every=4)
    for version in range(1, 31):
        values = step(reward_mean=0.9 if version == 10 else 0.5, staleness_mean=2.0, kl_reference=0.1)
        watch.add(version, values)
        if version % 4 == 0 and version < 28:
            watch.add(version, gold(0.9 if version == 12 else 0.5))
    # the best reward is of steps 10 to 14, whose newest answers are of version 11; step 30 was sampled by 27, so that
    # the answers of 28 to 30 are still to come. Marks are 25 and 30, the best gold of 12 to 20 is that of 16, and 28
    # is still to be evaluated
    assert watch.needed(range(31)) == {11, 16, 20, 24, 25, 28, 29, 30}
    assert watch.needed(range(0, 31, 10)) == {10, 20, 30}
    assert watch.needed([]) == set()


def test_an_evaluation_that_a_resumed_run_makes_again_counts_once() -> None:
    watch = watcher("gold")
    for version, mean in ((5, 0.0), (10, 0.1), (10, 0.3)):
        assert watch.add(version, gold(mean)) is None, "there are two evaluations"
    assert watch.add(15, gold(0.5))
