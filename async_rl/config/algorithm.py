"""How a batch becomes a loss. docs/algorithms.md has the formulas; presets.py names common combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from async_rl.config.check import check
from async_rl.config.presets import PRESETS

Advantage = Literal[
    "grpo", "dr_grpo", "rloo", "maxrl", "remax", "reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace"
]
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")
"""A reward against those of its own group: they need at least two answers, and equal rewards give zeros."""
CRITIC_ADVANTAGES = ("gae", "vtrace")
CorrectionKind = Literal["none", "token_tis", "sequence_tis", "geometric_tis", "topr"]
Bounds = tuple[float, float]
UNBOUNDED: Bounds = (0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    low: float = 0.2
    high: float = 0.28
    """The ratio is held in [1 - low, 1 + high]; high .inf: no upper bound."""
    dual: float = 3.0
    """ppo_clip: bounds the loss of a negative-advantage token at dual * |A|. 0 turns it off."""
    tv: float = 0.2
    """dppo_tv: a token whose probability has moved further than this in its advantage's direction is dropped."""
    tv_pull: float = 1e-3
    """dppo_tv: coefficient of (log ratio)^2, which pulls all tokens back. 0 turns it off."""

    def __post_init__(self) -> None:
        check(0 < self.low <= 1, "algorithm.clip.low", self.low, "in (0, 1]")
        check(self.high > 0, "algorithm.clip.high", self.high, "above 0")
        check(self.dual == 0 or self.dual > 1, "algorithm.clip.dual", self.dual, "0 (off) or above 1")
        check(0 < self.tv <= 1, "algorithm.clip.tv", self.tv, "in (0, 1]")
        check(self.tv_pull >= 0, "algorithm.clip.tv_pull", self.tv_pull, "0 (off) or more")


@dataclass(frozen=True, kw_only=True)
class MasksConfig:
    """What is left out of the loss; any number of them at once. rho = exp(proximal - behaviour logprob)."""

    token: Bounds = UNBOUNDED
    """Tokens with rho outside (IcePop: [0.5, 5.0])."""
    sequence: Bounds = UNBOUNDED
    """Answers with the product of their rho outside, e.g. [0.0, 3.0]."""
    geometric: Bounds = UNBOUNDED
    """Answers with the geometric mean of their rho outside, e.g. [0.99, 1.01]."""
    m2po: float = 0.0
    """The tokens of largest (log rho)^2, until the mean of the rest is below this, e.g. 0.04. 0 turns it off."""
    opsm: float = 0.0
    """Answers of negative advantage whose mean log rho is below minus this, e.g. 0.5. 0 turns it off."""
    veto: float = 0.0
    """Answers that hold a token with rho below this, e.g. 1e-4. 0 turns it off."""

    def __post_init__(self) -> None:
        for name in ("token", "sequence", "geometric"):
            low, high = getattr(self, name)
            allowed = "[low, high] with 0 <= low < high"
            check(0 <= low < high, f"algorithm.correction.masks.{name}", [low, high], allowed)
        for name in ("m2po", "opsm", "veto"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"algorithm.correction.masks.{name}", value, "0 (off) or more")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    kind: Literal["auto", "none", "token_tis", "sequence_tis", "geometric_tis", "topr"] = "auto"
    """The weight of a token. auto: none at staleness.max 0, token_tis above; none where the loss or the advantage
    corrects already (algorithm.proximal behaviour, algorithm.advantage vtrace)."""
    floor: float = 0.0
    cap: float = 2.0
    """Weights are held in [floor, cap]; `correction: {floor: 0.5, cap: 2.0}` is the two-sided clip."""
    batch_normalised: bool = False
    """Weights are divided by their mean over the minibatch, once they are held in [floor, cap]."""
    masks: MasksConfig = field(default_factory=MasksConfig)

    def __post_init__(self) -> None:
        check(
            not self.batch_normalised or self.kind in ("auto", "token_tis", "sequence_tis", "geometric_tis"),
            "algorithm.correction.batch_normalised", self.batch_normalised,
            f"false with algorithm.correction.kind {self.kind}",
            "Set kind: token_tis, sequence_tis or geometric_tis.",
        )
        check(self.cap > 0, "algorithm.correction.cap", self.cap, "above 0 (.inf: no cap)")
        check(0 <= self.floor < self.cap, "algorithm.correction.floor", self.floor, "at least 0 and below the cap")


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """Keeps the policy near the frozen reference model."""

    kind: Literal["none", "k1_reward", "k2_loss", "k3_loss"] = "none"
    """k1_reward: taken off the reward of each token. k2_loss: the same gradient as a loss. k3_loss: the gradient of
    the other KL divergence, KL(reference || policy)."""
    coef: float = 1e-3
    target: float = 0.0
    """Nats a token that the coefficient is adapted to keep; 0: it stays as it is."""

    def __post_init__(self) -> None:
        check(0 < self.coef < math.inf, "algorithm.kl.coef", self.coef, "above 0", "Turn it off by kl.kind: none.")
        check(self.target >= 0, "algorithm.kl.target", self.target, "0 (fixed coefficient) or more")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    preset: str = "grpo"
    """Sets the keys of this section that are not given: presets.py. Applied where the configuration is loaded."""
    advantage: Advantage = "grpo"
    """gae and vtrace train a critic; the others compare rewards."""
    gamma: float = 1.0
    lam: float = 0.95
    """gae, vtrace."""
    whiten: bool = False
    """Advantages lose their mean and are divided by their deviation, both over the trained tokens of the batch. The
    REINFORCE++ advantages always are."""
    loss: Literal["ppo_clip", "cispo", "gspo", "dppo_tv"] = "ppo_clip"
    proximal: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    """What the loss's ratio is centred on. recompute: the learner's logprobs at step start (decoupled). interpolate:
    log-linear between behaviour and learner by version, saves their forward pass. behaviour: coupled."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over trained tokens; mean over answers of their means; sum / (answers * rollout.max_response_tokens)."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    entropy_coef: float = 0.0
    """Of the entropy bonus; 0 turns it off."""
    epochs: int = 1
    minibatches: int = 1
    """Optimizer steps per batch are epochs * minibatches."""
    early_stop_kl: float = 0.0
    """KL(proximal || learner) of a minibatch, in nats a token, over which the rest of a batch's optimizer steps is left
    out. 0 turns it off."""
    skip_batch_kl: float = 0.0
    """KL(behaviour || proximal), in nats a token, over which a batch is counted and not trained on. 0 turns it off."""
    filter_zero_variance: bool = True
    """Groups of equal rewards, which teach an advantage within the group nothing, are dropped and counted. Such groups
    one after another with the same reward (a solved task, or a hopeless one) end the run. Advantages that look beyond
    the group (remax, reinforce_pp, gae, vtrace) keep them all."""

    def __post_init__(self) -> None:
        check(self.preset in PRESETS, "algorithm.preset", self.preset, f"one of {', '.join(PRESETS)}")
        check(0 < self.gamma <= 1, "algorithm.gamma", self.gamma, "in (0, 1]")
        check(0 <= self.lam <= 1, "algorithm.lam", self.lam, "in [0, 1]")
        check(self.epochs >= 1, "algorithm.epochs", self.epochs, "at least 1")
        check(self.minibatches >= 1, "algorithm.minibatches", self.minibatches, "at least 1")
        check(0 <= self.entropy_coef < math.inf, "algorithm.entropy_coef", self.entropy_coef, "0 (off) or more")
        self._check_limits()
        self._check_ratios()
        self._check_gspo()

    @property
    def steps_per_batch(self) -> int:
        return self.epochs * self.minibatches

    def _check_limits(self) -> None:
        for name in ("early_stop_kl", "skip_batch_kl"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"algorithm.{name}", value, "0 (off) or more")
            check(
                value == 0 or self.proximal != "interpolate", f"algorithm.{name}", value,
                "0 with algorithm.proximal interpolate", "Interpolated logprobs don't show how far the policy is.",
            )
        check(
            self.early_stop_kl == 0 or self.steps_per_batch > 1, "algorithm.early_stop_kl", self.early_stop_kl,
            "0 with one optimizer step per batch", "Set algorithm.epochs or algorithm.minibatches above 1.",
        )

    def _check_ratios(self) -> None:
        kind = self.correction.kind
        discounted = (*CRITIC_ADVANTAGES, "reinforce_pp")
        check(
            self.gamma == 1 or self.advantage in discounted, "algorithm.gamma", self.gamma,
            f"1 with algorithm.advantage {self.advantage}", f"Only {', '.join(discounted)} discount.",
        )
        check(
            self.proximal != "interpolate" or self.steps_per_batch > 1, "algorithm.proximal", self.proximal,
            "recompute or behaviour with one optimizer step per batch",
            "Its one forward pass gives the proximal logprobs already: there is none to save.",
        )
        normalised = self.correction.batch_normalised
        check(
            not normalised or self.proximal == "recompute", "algorithm.correction.batch_normalised", normalised,
            f"false with algorithm.proximal {self.proximal}",
            "Weights of a whole minibatch need its proximal logprobs before its first step. Use recompute.",
        )
        m2po = self.correction.masks.m2po
        check(
            self.proximal != "interpolate" or m2po == 0, "algorithm.correction.masks.m2po", m2po,
            "0 with algorithm.proximal interpolate",
            "The mask needs the proximal logprobs of a whole minibatch before its first step. Use recompute.",
        )
        check(
            self.proximal != "behaviour" or kind in ("auto", "none"), "algorithm.correction.kind", kind,
            "auto or none with algorithm.proximal behaviour",
            "The ratio to the behaviour policy is in the loss: a weight would count it twice.",
        )
        check(
            self.advantage != "vtrace" or kind in ("auto", "none"), "algorithm.correction.kind", kind,
            "auto or none with algorithm.advantage vtrace", "Its advantages carry the truncated ratio already.",
        )
        check(
            self.advantage != "vtrace" or self.proximal != "behaviour", "algorithm.proximal", self.proximal,
            "recompute or interpolate with algorithm.advantage vtrace",
            "Its advantages carry the ratio to the behaviour policy already.",
        )

    def _check_gspo(self) -> None:
        whole = self.loss == "gspo"
        check(
            not whole or (self.advantage not in CRITIC_ADVANTAGES and self.gamma == 1), "algorithm.loss", self.loss,
            f"ppo_clip, cispo or dppo_tv with algorithm.advantage {self.advantage} and gamma {self.gamma}",
            "GSPO has one ratio an answer, so it needs one advantage an answer.",
        )
        check(
            not whole or self.kl.kind != "k1_reward", "algorithm.kl.kind", self.kl.kind,
            "none, k2_loss or k3_loss with algorithm.loss gspo", "A reward a token gives an advantage a token.",
        )
        check(
            not whole or self.aggregation == "sequence_mean", "algorithm.aggregation", self.aggregation,
            "sequence_mean with algorithm.loss gspo", "Its loss is one number an answer.",
        )
