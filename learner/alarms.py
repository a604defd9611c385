"""Raises an alarm when a metric has left the range in which training is known to work.

The first step that breaks a rule gives a text for the console and wandb; the metric `alarm/<name>` is 1 while the rule
is broken, and 0 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from async_rl.telemetry.metrics import Metric


@dataclass(frozen=True, slots=True)
class Rule:
    """The limit that one metric has to keep, and the advice in the alarm if it does not."""

    name: str
    key: str
    limit: float
    is_floor: bool
    """True: the value must not be below the limit. False: its magnitude must not be above the limit."""
    advice: str
    """The meaning of a broken rule, and the setting to change."""


def rules_for(compute_dtype: torch.dtype, *, has_weights: bool = True) -> tuple[Rule, ...]:
    """Return the rules, which docs/algorithms.md lists; in bfloat16 the mismatch may be ten times that in float32.

    Args:
        has_weights: importance weights multiply the loss; else none is truncated, and no rule watches how many are.
    """
    mismatch = 0.01 if compute_dtype == torch.float32 else 0.1
    rules = (
        Rule(
            "ess", "offpolicy/ess", 0.3, True,
            "few tokens carry most of the importance weight. Lower staleness.depth or learner.lr",
        ),
        Rule(
            "kl", "offpolicy/kl_behaviour_proximal", 0.1, False,
            "the policy has moved far, in nats a token, from the one that sampled. Lower staleness.depth or learner.lr",
        ),
        Rule(
            "truncated", "offpolicy/truncated_fraction", 0.05, False,
            "truncated importance weights bias the gradient. Lower staleness.depth or learner.lr, or raise "
            "algorithm.correction.cap, or lower algorithm.correction.floor if it is set",
        ),
        Rule(
            "mismatch", "mismatch/mean_abs", mismatch, False,
            "engine and learner compute different logprobs from the same weights. Use model.dtype: float32, "
            "rollout.top_p: 1.0 and no quantisation in rollout.server_args",
        ),
        Rule(
            "vtrace", "vtrace/reach", 0.5, True,
            "V-trace carries less than half of a final reward back over the median answer. Use algorithm.advantage: "
            "gae, or lower staleness.depth",
        ),
        Rule(
            "policy_skipped", "policy/skipped_steps", 0, False,
            "a loss or gradient of the policy was not finite. Lower learner.lr or use model.dtype: float32",
        ),
        Rule(
            "critic_skipped", "critic/skipped_steps", 0, False,
            "a loss or gradient of the critic was not finite. Lower critic.lr or use model.dtype: float32",
        ),
    )  # fmt: skip
    return tuple(rule for rule in rules if has_weights or rule.name != "truncated")


class Alarms:
    """Checks the rules at each step. A rule gives a text only when it breaks, not at each step while it is broken."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._active: set[str] = set()

    def check(self, step: int, metrics: Sequence[Metric]) -> tuple[tuple[str, ...], list[Metric]]:
        """Return (a text for each rule that is newly broken, the metric `alarm/<name>` of each rule that was checked).

        A rule whose metric was not measured is not checked and stays as it was.
        """
        values = {metric.key: metric.value for metric in metrics}
        texts = []
        states = []
        for rule in self._rules:
            if rule.key not in values:
                continue
            value = values[rule.key]
            broken = not (value >= rule.limit if rule.is_floor else abs(value) <= rule.limit)  # NaN breaks every rule
            if broken and rule.name not in self._active:
                side = "below" if rule.is_floor else "above"
                texts.append(f"ALARM at step {step}: {rule.key} is {value:.3g}, {side} {rule.limit:g}: {rule.advice}.")
            (self._active.add if broken else self._active.discard)(rule.name)
            states.append(Metric(f"alarm/{rule.name}", float(broken), "max"))
        return tuple(texts), states
