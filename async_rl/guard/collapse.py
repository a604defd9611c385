"""The signals that a run has stopped learning, or loses what it has learned, as pure functions of its metrics.

    start   means over the first window of alarms.window_steps steps
    now     means over the newest one
    before  means over the one that ends before the newest step
    best    the highest mean reward of any window

Each signal is a number with a limit, alarms.<name>_limit, and an alarm, the metric alarm/<name>. How the limits were
found, and how early the alarms came in other runs, stands in docs/not-learning.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from async_rl.config.alarms import AlarmsConfig

Values = Mapping[str, float]
KEYS = (
    "reward/mean", "reward/std", "response/truncated_fraction", "response/repeated_fraction", "policy/entropy",
    "policy/grad_norm", "policy/weight_change", "offpolicy/kl_behaviour_proximal_k3",
    "offpolicy/kl_proximal_learner_k3",
)  # fmt: skip
LOST = 0.1
"""A policy has lost reward if the window's has fallen by more than this share: then a small entropy or gradient is no
success."""
LEARNED = 0.1
"""A policy has learned something once the mean reward of a window has been above that at the start by this share of its
standard deviation at the start: before, it may move as far as it likes."""
FEWEST_NATS = 0.25
"""A jump is a share of at least so many nats a token: entropies near 0 are noisy."""
SPREAD = 0.1
"""The rewards of a batch differ if their deviation is above this share of that at the start."""


@dataclass(frozen=True, slots=True)
class CollapseSignal:
    """A signal, after whose name its limit and its alarm are called."""

    name: str
    text: str
    """The words on the console, with the fields of its SignalValue in the places of their names."""
    advice: str
    """The meaning of the alarm, and the setting to change."""
    is_floor: bool = False
    """True: the value must not be below its limit. False: not above it."""
    is_caution: bool = False
    """True: the run may go on as it is, so that the alarm never ends it."""

    def limit(self, config: AlarmsConfig) -> float:
        return float(getattr(config, f"{self.name}_limit"))

    def is_beyond(self, value: float, config: AlarmsConfig) -> bool:
        """Return whether a value is beyond the limit of the signal; NaN is not."""
        limit = self.limit(config)
        return value < limit if self.is_floor else value > limit


COLLAPSE_SIGNALS = {
    signal.name: signal for signal in (
        CollapseSignal(
            "reward", "the mean reward has fallen from {best:.3g} to {now:.3g}",
            "The policy loses what it has learned. Lower learner.lr or staleness.depth, and go on from a checkpoint "
            "before the fall",
        ),
        CollapseSignal(
            "jump", "entropy and KL have jumped from {start:.2g} to {now:.2g} nats a token in a step",
            "A step went too far, and what was learned may be lost with it. Lower learner.lr, or bound the steps by "
            "algorithm.early_stop_kl, algorithm.skip_batch_kl or learner.grad_clip",
        ),
        CollapseSignal(
            "stride", "a step has moved the weights {value:.2g} times as far as steps usually do",
            "What was learned may be lost with it. Lower learner.lr, or look for what has changed: the learning rate, "
            "or the scale of rewards and advantages",
        ),
        CollapseSignal(
            "cut", "{now:.0%} of the answers are cut off, {start:.0%} at the start",
            "Answers no longer end. Lower learner.lr, or raise rollout.max_response_tokens if they are right but long",
        ),
        CollapseSignal(
            "all_cut", "{now:.0%} of the answers are cut off, {start:.0%} at the start, and rewards are low",
            "What is cut off can hardly be right. Raise rollout.max_response_tokens, or ask for shorter answers",
            is_caution=True,
        ),
        CollapseSignal(
            "repeated", "{now:.0%} of the prompts get one and the same answer, {start:.0%} at the start",
            "The policy no longer reads the prompt. Lower learner.lr, or hold it by algorithm.kl or "
            "algorithm.entropy_coef",
        ),
        CollapseSignal(
            "entropy", "the entropy is {now:.2g} nats a token, {start:.2g} at the start, at a reward below its best",
            "The policy samples one answer only, so there is nothing to compare. Lower learner.lr, or set "
            "algorithm.entropy_coef", is_floor=True,
        ),
        CollapseSignal(
            "gradient", "the gradient is {value:.2g} times that at the start, at rewards that differ or have fallen",
            "Nothing is learned: the answers to a prompt all get the same reward. Go back to a checkpoint with more "
            "entropy, or take prompts that are neither always nor never solved", is_floor=True,
        ),
    )
}  # fmt: skip
"""The signals by name."""


@dataclass(frozen=True, slots=True)
class SignalValue:
    """The value of a signal, and the numbers that its text tells."""

    value: float
    start: float
    now: float
    best: float = math.nan


def mean_over(steps: Iterable[Values]) -> dict[str, float]:
    """Return the means over steps of the metrics that signals read, each over the steps that have it."""
    steps = list(steps)
    found = {key: [step[key] for step in steps if _is_measured(key, step)] for key in KEYS}
    return {key: math.fsum(values) / len(values) for key, values in found.items() if values}


def _is_measured(key: str, step: Values) -> bool:
    """Return whether a step has a number; one that was skipped has not moved the weights, and tells nothing of others.
    """
    return math.isfinite(step.get(key, math.nan)) and (key != "policy/weight_change" or step[key] > 0)


def reward_fall(newest: Sequence[float], start: float, start_std: float, best: float) -> tuple[float, float]:
    """Return how far the mean reward has fallen, and the mean of the newest steps that show it most. W = len(newest)

        max over n = 1..W of  sqrt(n / W) * (best - mean of the n newest) / max(best - start, start_std / 2)

    Fewer steps are noisier and must show a larger fall. Half of the deviation stands for the gain of a run that has
    gained less. It is 0 if all rewards were and are the same.
    """
    means = [math.fsum(newest[-n:]) / n for n in range(1, len(newest) + 1)]
    scale = max(best - start, start_std / 2)
    if scale <= 0:
        return 0.0, means[-1]
    return max((math.sqrt(n / len(means)) * (best - mean) / scale, mean) for n, mean in enumerate(means, 1))


def surprise(values: Values) -> float | None:
    """Return how surprised a policy is by a batch, in nats a token; None: its entropy is not known.

        H(policy) + KL(behaviour || proximal) + KL(proximal || learner)

    It is about -log p of a token, less noisy: the policy's own uncertainty, how far it has moved since the batch was
    sampled, and how far the step moves it, if that takes several passes or minibatches.
    """
    if "policy/entropy" not in values:
        return None
    moved = (values.get(f"offpolicy/kl_{pair}_k3", 0.0) for pair in ("behaviour_proximal", "proximal_learner"))
    return values["policy/entropy"] + math.fsum(moved)


def jump(newest: Values, before: Values) -> SignalValue | None:
    """Return by which share the surprise of the newest step is above that of the window before; None: one is unknown.
    """
    now, mean = surprise(newest), surprise(before)
    if now is None or mean is None:
        return None
    return SignalValue((now - mean) / max(mean, FEWEST_NATS), mean, now)


def moved_weights(step: Values) -> list[float]:
    """Return how far a step has moved the weights; nothing of one that was skipped."""
    return [step["policy/weight_change"]] if _is_measured("policy/weight_change", step) else []


def stride(newest: Values, changes: Sequence[float]) -> SignalValue | None:
    """Return how many times as far the newest step has moved the weights as the median of all steps before it.

    The median, so that steps that grow little by little do not become usual. None: one of the two is not known.

    Args:
        changes: `moved_weights` of the steps before.
    """
    now = newest.get("policy/weight_change")
    if now is None or not changes:
        return None
    usual = statistics.median(changes)
    return SignalValue(now / usual, usual, now)


def collapse_signals(
    window: Sequence[Values],
    before: Values,
    start: Values,
    best: float,
    right_above: float,
    changes: Sequence[float],
) -> dict[str, SignalValue]:
    """Return each signal that the metrics allow, by name.

    Args:
        window: the metrics of the steps of the newest window, in order.
        before, start: means over the window before the newest step, {} if there was none, and over the first one.
        best: the highest mean reward of a window so far.
        right_above: the reward of a right answer; low rewards are below half of it.
        changes: `moved_weights` of all steps before the newest.
    """
    found: dict[str, SignalValue] = {}
    fall, spread, now = 0.0, 0.0, mean_over(window)
    rewards = [step["reward/mean"] for step in window if math.isfinite(step.get("reward/mean", math.nan))]
    if rewards and "reward/mean" in start:
        first, std = start["reward/mean"], start.get("reward/std", 0.0)
        fall, newest = reward_fall(rewards, first, std, best)
        found["reward"] = SignalValue(fall, first, newest, best)
        fall, _ = reward_fall([now["reward/mean"]], first, std, best)  # of the window as a whole
        spread = now.get("reward/std", 0.0) / std if std > 0 else 0.0
        newest_step = mean_over(window[-1:])
        for name, moved in (("jump", jump(newest_step, before)), ("stride", stride(newest_step, changes))):
            if moved:
                found[name] = moved if best - first > LEARNED * std else replace(moved, value=0.0)
    for name, key in (("cut", "response/truncated_fraction"), ("repeated", "response/repeated_fraction")):
        if key in now and key in start:
            found[name] = SignalValue(now[key] - start[key], start[key], now[key])
    if "cut" in found and "reward/mean" in now:
        is_low = now["reward/mean"] < min(right_above, right_above / 2)
        share = found["cut"].now
        found["all_cut"] = SignalValue(share if is_low else 0.0, found["cut"].start, share)
    if "policy/entropy" in now and "policy/entropy" in start:
        entropy = now["policy/entropy"]
        found["entropy"] = SignalValue(entropy if fall > LOST else math.inf, start["policy/entropy"], entropy)
    if start.get("policy/grad_norm", 0.0) > 0 and "policy/grad_norm" in now:
        first, norm = start["policy/grad_norm"], now["policy/grad_norm"]
        share = norm / first if fall > LOST or spread > SPREAD else math.inf
        found["gradient"] = SignalValue(share, first, norm)
    return found
