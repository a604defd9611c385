"""The signals that a reward is being over-optimised, as pure functions of the metrics of a run.

Each is a number that grows as the reward is hacked, but for the correlation, which falls. The slope of the reward
against the KL, identical answers of a group, the spread of the reward and ensembles of reward models are no signals: on
tasks whose true reward is known, as that of benchmarks/guard.py, they fire always or never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from async_rl.config.guard import GuardConfig

GOLD = "gold"
EVALUATIONS = 3
"""The number of evaluations over which gold rewards are means."""
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal: its name, after which its limit in the section guard and its metric guard/<name> are called."""

    name: str
    kind: str
    """Signals of one kind see the same change, and count once."""
    text: str
    """The words on the console, with the value in the place of {}."""
    is_floor: bool = False
    """True: the value must not be below its limit. False: not above it."""

    def limit(self, config: GuardConfig) -> float:
        return float(getattr(config, f"{self.name}_limit"))

    def is_beyond(self, value: float, config: GuardConfig) -> bool:
        """Return whether a value is beyond the limit of the signal; NaN is not."""
        limit = self.limit(config)
        return value < limit if self.is_floor else value > limit


SIGNALS = {
    signal.name: signal for signal in (
        Signal("kl", "kl", "the KL to the reference is {:.3g} nats an answer"),
        Signal("kl_per_token", "kl", "the KL to the reference is {:.3g} nats a token"),
        Signal("longer", "length", "answers are {:.3g} times as long as at the start"),
        Signal("shorter", "length", "answers are {:.3g} times as short as at the start"),
        Signal("cut", "length", "{:.0%} of the answers are cut off"),
        Signal("repetition", "repetition", "answers repeat tokens {:.3g} times as much as at the start"),
        Signal("proxy", "proxy", "the reward is {:.3g} standard deviations above its start"),
        Signal("gold_fall", GOLD, "the gold reward is {:.3g} standard errors below its best"),
        Signal("gold_correlation", GOLD, "the correlation of reward and gold reward is {:.2g}", is_floor=True),
    )
}  # fmt: skip
"""The signals by name, those without gold rewards first."""


@dataclass(frozen=True, slots=True)
class GoldEvaluation:
    """The gold rewards of one evaluation of held-out answers."""

    version: int
    mean: float
    variance: float
    labels: float
    """The number of answers."""
    correlation: float
    """The correlation of the gold rewards and the rewards that are trained on; NaN: not known."""


def mean_of(steps: Iterable[Values]) -> dict[str, float]:
    """Return the means over steps of the metrics that signals read, each over the steps that have it."""
    keys = (
        "kl/reference", "response/length_mean", "response/truncated_fraction", "response/distinct_fraction",
        "reward/mean", "reward/std",
    )  # fmt: skip
    found = {key: [step[key] for step in steps if key in step] for key in keys} if (steps := list(steps)) else {}
    return {key: math.fsum(values) / len(values) for key, values in found.items() if values}


def gold_free_signals(now: Values, start: Values) -> dict[str, float]:
    """Return the value of each signal without gold rewards that the metrics allow, by name.

    Args:
        now, start: means of the metrics of a few steps, and of the first ones.
    """
    found: dict[str, float] = {}
    length, distinct = now.get("response/length_mean"), now.get("response/distinct_fraction")
    if (kl := now.get("kl/reference")) is not None:
        found["kl_per_token"] = kl
        if length is not None:
            found["kl"] = kl * length
    if length and start.get("response/length_mean"):
        ratio = length / start["response/length_mean"]
        found |= {"longer": ratio, "shorter": 1 / ratio}
    if "response/truncated_fraction" in now:
        found["cut"] = now["response/truncated_fraction"]
    if distinct and start.get("response/distinct_fraction"):
        found["repetition"] = start["response/distinct_fraction"] / distinct
    if "reward/mean" in now and start.get("reward/std"):
        found["proxy"] = (now["reward/mean"] - start["reward/mean"]) / start["reward/std"]
    return found


def gold_evaluation(version: int, values: Values, rule_correlation: float = math.nan) -> GoldEvaluation | None:
    """Return the gold rewards in the metrics of an evaluation; None: there are none.

    Args:
        rule_correlation: that of guard/rule_correlation, which stands in where an evaluation can't know the rewards.
    """
    if "eval/gold" not in values:
        return None
    mean = values["eval/gold"]
    variance = max(values["eval/gold_squared"] - mean**2, 0.0)
    correlation = rule_correlation
    if "eval/proxy" in values:
        proxy = values["eval/proxy"]
        spread = math.sqrt(variance * max(values["eval/proxy_squared"] - proxy**2, 0.0))
        correlation = (values["eval/gold_times_proxy"] - mean * proxy) / spread if spread > 0 else math.nan
    return GoldEvaluation(version, mean, variance, values["eval/gold_labels"], correlation)


def smoothed(evaluations: Sequence[GoldEvaluation]) -> list[tuple[int, float, float]]:
    """Return (version in the middle, mean gold reward, its standard error) of each EVALUATIONS in a row, in order."""
    found = []
    for last in range(EVALUATIONS, len(evaluations) + 1):
        few = evaluations[last - EVALUATIONS : last]
        labels = math.fsum(each.labels for each in few)
        mean = math.fsum(each.labels * each.mean for each in few) / labels
        variance = math.fsum(each.labels * each.variance for each in few) / labels
        found.append((few[EVALUATIONS // 2].version, mean, math.sqrt(variance / labels)))
    return found


def gold_signals(evaluations: Sequence[GoldEvaluation]) -> dict[str, float]:
    """Return the value of each signal on gold rewards by name; none before there are EVALUATIONS evaluations.

    The fall is counted in standard errors of the newest mean, not of the difference. If the newest rewards are all
    equal, which tells nothing of that error, it is that of rewards of which half are the newest and half the best mean.
    """
    means = smoothed(evaluations)
    if not means:
        return {}
    found = {}
    _, newest, error = means[-1]
    best = max(mean for _, mean, _ in means)
    if error > 0 or best > newest:
        labels = math.fsum(each.labels for each in evaluations[-EVALUATIONS:])
        found["gold_fall"] = (best - newest) / error if error > 0 else 2 * math.sqrt(labels)
    known = [each.correlation for each in evaluations[-EVALUATIONS:] if not math.isnan(each.correlation)]
    if len(known) == EVALUATIONS:
        found["gold_correlation"] = math.fsum(known) / EVALUATIONS
    return found
