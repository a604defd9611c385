"""The section watch of the configuration, and the table of the watcher's rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from async_rl.base.config.check import Problem, SettingsError, check
from async_rl.base.config.section import Section, section
from async_rl.base.config.system import CheckpointConfig

Comparison = Literal["above", "below", "share", "growth", "fall", "gold fall"]
"""
above        mean of the window > limit; of a window of one step, its absolute value
below        mean of the window < limit
share        mean of the window < limit x mean of the first window
growth       median of the window > limit x mean of the 10 steps before it, while the mean reward rises
fall         best window - newest steps > limit standard errors, and more than half of the gain
gold fall    best three evaluations - newest ones > limit standard errors"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the watcher: it raises an alarm when its metric breaks its limit."""

    name: str
    metric: str
    """A metric of a step. Of the metrics of evaluations only eval/gold is compared, by gold fall."""
    window: int
    """The number of steps, or of evaluations with gold rewards, over which the metric is averaged."""
    comparison: Comparison
    limit: float
    meaning: str
    advice: str
    acts: bool = False
    """Whether watch.action is taken when the rule breaks. The other rules only warn."""


_OFF_POLICY = "Lower staleness.depth or learner.lr"
RULES = {
    rule.name: rule for rule in (
        Rule("ess", "offpolicy/ess", 1, "below", 0.3, "the ESS is {now:.2g}: few tokens carry most of the weight",
             _OFF_POLICY),
        Rule("kl", "offpolicy/kl_behaviour_proximal", 1, "above", 0.1,
             "the policy is {now:.2g} nats a token from the one that sampled", _OFF_POLICY),
        Rule("truncated", "offpolicy/truncated_fraction", 1, "above", 0.05,
             "{now:.0%} of the importance weights are truncated, which biases the gradient",
             f"{_OFF_POLICY}, or raise algorithm.correction.cap, or lower algorithm.correction.floor if it is set"),
        Rule("mismatch", "parity/precision/mean_abs", 1, "above", 0.1,
             "logprobs of engine and learner differ by {now:.2g} at the same weights",
             "Use model.dtype: float32 and no quantisation in rollout.server_args"),
        Rule("policy_skipped", "policy/skipped_steps", 1, "above", 0,
             "a loss or gradient of the policy was not finite", "Lower learner.lr or use model.dtype: float32"),
        Rule("critic_skipped", "critic/skipped_steps", 1, "above", 0,
             "a loss or gradient of the critic was not finite", "Lower critic.lr or use model.dtype: float32"),
        Rule("cut", "response/truncated_fraction", 5, "above", 0.9, "{now:.0%} of the answers are cut off",
             "If a right answer has an end, raise rollout.max_response_tokens or ask for shorter answers"),
        Rule("reward", "reward/mean", 5, "fall", 4.0,
             "the mean reward has fallen from {best:.3g} to {now:.3g}, by {value:.2g} standard errors",
             "The policy loses what it has learned. Lower learner.lr or staleness.depth; resume earlier", acts=True),
        Rule("reference_kl", "kl/reference", 5, "growth", 2.0,
             "the KL to the reference has grown from {start:.2g} to {now:.2g} nats a token, while the reward rises",
             "The policy may have found where the reward is wrong. Read answers; raise algorithm.kl.coef", acts=True),
        Rule("diversity", "response/distinct_fraction", 5, "share", 0.3,
             "{now:.0%} of the tokens of an answer are distinct, {start:.0%} at the start",
             "Answers repeat themselves. Lower learner.lr, or raise algorithm.kl.coef", acts=True),
        Rule("gold", "eval/gold", 3, "gold fall", 4.0,
             "the gold reward has fallen from {best:.3g} to {now:.3g}, by {value:.2g} standard errors",
             "The reward is over-optimised. Raise algorithm.kl.coef, or end with the best checkpoint", acts=True),
    )
}  # fmt: skip
"""The rules by name. docs/how-to/watcher.md describes them; benchmarks/results/watcher.md has their error rates."""


@section("watch")
class WatchConfig:
    """The watcher: it checks the metrics of a run by the rules of docs/how-to/watcher.md, and acts when one breaks."""

    action: Literal["warn", "pause", "stop", "rollback"] = "warn"
    """What happens at an alarm. warn: only a line on the console. The others act only for the rules reward, gold,
    reference_kl and diversity. pause: the learner waits for `async-rl answer RUN`. stop: the run ends with the model of
    the last checkpoint before the trouble. rollback: the run continues from that checkpoint, with half the learning
    rate and twice the KL coefficient."""
    rules: Section[dict[str, float | Literal["off"]]] = field(default_factory=dict)
    """Limits that replace the rules' defaults, by name, such as {ess: 0.2, cut: off}."""
    max_rollbacks: PositiveInt = 2
    """The most rollbacks of a run. After that, the next trouble ends the run as stop does."""
    rollbacks: NonNegativeInt = 0
    """How often the run has rolled back. The run sets it."""

    def __post_init__(self) -> None:
        if unknown := [f"watch.rules.{name}" for name in self.rules if name not in RULES]:
            hint = f"; the rules are {', '.join(RULES)}"
            raise SettingsError([Problem(key, f"unknown key {key}", hint) for key in unknown])

    @property
    def acts(self) -> bool:
        """Whether the watcher does more than warn."""
        return self.action != "warn"

    @property
    def kl_factor(self) -> float:
        """2 to the power of `rollbacks`: multiplies the KL coefficient and divides the learning rate."""
        return 2.0**self.rollbacks


def check_watch(watch: WatchConfig, checkpoint: CheckpointConfig) -> None:
    """Check that a run whose watcher may go back to a checkpoint writes checkpoints."""
    check(
        not watch.acts or checkpoint.every_steps > 0, "checkpoint.every_steps", checkpoint.every_steps,
        f"above 0 with watch.action {watch.action}", "The run goes back to a checkpoint before the trouble.",
    )
