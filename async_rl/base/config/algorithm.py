"""The section `algorithm`: how a batch becomes a loss. docs/reference/algorithms.md has the formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, Section, Unbounded, checked, read_params, section
from async_rl.base.seams import ADVANTAGES, CORRECTIONS, LOSSES, Advantage, Correction, Loss, find_entry

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},  # the defaults
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {"advantage": "rloo"},
    "remax": {"advantage": "remax"},
    "reinforce_pp": {"advantage": "reinforce_pp", "clip": {"high": 0.2}},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip": {"high": 0.2}},
    "ppo": {"advantage": "gae", "old_logprobs": "rollout", "clip": {"high": 0.2, "dual": 0.0}},
    "decoupled_ppo": {"advantage": "gae", "clip": {"high": 0.2}},
    "vtrace": {"advantage": "vtrace", "gae_lambda": 1.0, "clip": {"high": 0.2}},
    "cispo": {"loss": "cispo", "old_logprobs": "rollout", "clip": {"low": 1.0, "high": 4.0}},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip": {"low": 3e-4, "high": 4e-4}},
    "dppo_tv": {"loss": "dppo_tv", "old_logprobs": "rollout"},
    "dppo_kl": {"loss": "dppo_kl", "old_logprobs": "rollout"},
    "m2po": {"correction": {"masks": {"m2po": 0.04}}},
    "icepop": {"correction": {"kind": "token_tis", "cap": float("inf"), "masks": {"token": [0.5, 5.0]}}},
    "kpop": {"correction": {"kind": "token_tis", "cap": float("inf"), "masks": {"kpop": 0.1}}},
}


UNBOUNDED = (0.0, math.inf)
Bounds = Annotated[
    List[tuple[Unbounded, Unbounded]],
    checked(lambda bounds: 0 <= bounds[0] < bounds[1], "[low, high] with 0 <= low < high"),
]


@section("algorithm.clip")
class ClipConfig:
    """The limits to which a loss clips its ratio. They bound how far one batch moves the policy."""

    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio to the proximal policy is clipped below 1 - low."""
    high: Annotated[Unbounded, Field(gt=0)] = 0.28
    """The ratio to the proximal policy is clipped above 1 + high; .inf: no upper limit."""
    dual: Annotated[NonNegativeFloat, checked(lambda dual: dual == 0 or dual > 1, "0 (off) or above 1")] = 3.0
    """The loss of a token with negative advantage A is at most dual * |A|. 0: off. Only for algorithm.loss ppo_clip."""


@section("algorithm.params")
class DppoTvSettings:
    """The settings of the loss dppo_tv."""

    tv: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A token is left out once its probability has moved by more than this in the direction of its advantage."""
    tv_pull: NonNegativeFloat = 1e-3
    """The coefficient of a (log ratio)^2 penalty on every token. 0 turns it off."""


@section("algorithm.params")
class DppoKlSettings:
    """The settings of the loss dppo_kl."""

    kl: PositiveFloat = 0.05
    """A token is left out once it has moved in the direction of its advantage by a binary KL above this, in nats."""


@section("algorithm.params")
class SatSettings:
    """The settings of the loss sat."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Clipping is tighter for the tokens of a micro-batch whose |log ratio| is above this quantile."""


@section("algorithm.params")
class ScoreCenteringSettings:
    """The settings of the loss score_centering."""

    cap: Annotated[Unbounded, Field(ge=0)] = 2.0
    """The largest importance weight of the sampled token and of the tokens that center it; .inf: no cap. 0: all
    weights 1."""


@section("algorithm.correction.masks")
class MasksConfig:
    """Rules that leave tokens and rows out of the loss because they are too far off-policy. Any number of them may
    be on. rho = exp(proximal - behaviour logprob)."""

    token: Bounds = UNBOUNDED
    """A token is left out if its rho is outside of [low, high]. IcePop uses [0.5, 5.0]."""
    kpop: NonNegativeFloat = 0.0
    """A token is left out if the binary KL divergence between its proximal and behaviour probabilities, in either
    direction, is above this, in nats, e.g. 0.1. 0: off."""
    sequence: Bounds = UNBOUNDED
    """A row is left out if the product of its tokens' rho is outside of [low, high], e.g. [0.0, 3.0]."""
    geometric: Bounds = UNBOUNDED
    """A row is left out if the geometric mean of its tokens' rho is outside of [low, high], e.g. [0.99, 1.01]."""
    m2po: NonNegativeFloat = 0.0
    """Tokens with the largest (log rho)^2 are left out until the mean over the others is below this, e.g. 0.04. 0: off.
    """
    opsm: NonNegativeFloat = 0.0
    """A row with negative advantage is left out if its mean log rho is below minus this value, e.g. 0.5. 0: off."""
    veto: NonNegativeFloat = 0.0
    """A row is left out if one of its tokens has a rho below this, e.g. 1e-4. 0: off."""


@section("algorithm.correction")
class CorrectionConfig:
    """The importance weights that correct the loss for being off-policy, their limits, and the masks."""

    kind: Annotated[str, Named(CORRECTIONS, "algorithm.correction.kind", also=("auto",))] = "auto"
    """The rule that computes the weight of each token. auto: none at staleness.max 0 and where the loss or the
    advantage corrects already (algorithm.old_logprobs rollout, algorithm.advantage vtrace), else token_tis."""
    floor: NonNegativeFloat = 0.0
    """Weights below this are raised to it. Floor and cap together clip on both sides, e.g. {floor: 0.5, cap: 2.0}."""
    cap: Annotated[Unbounded, Field(gt=0)] = 2.0
    """Weights above this are lowered to this value; .inf: no cap."""
    batch_normalised: bool = False
    """Weights between floor and cap are divided by their mean over the minibatch."""
    masks: Section[MasksConfig] = field(default_factory=MasksConfig)

    def __post_init__(self) -> None:
        check(self.floor < self.cap, "algorithm.correction.floor", self.floor, "at least 0 and below the cap")
        kinds = [name for name, each in CORRECTIONS.items() if each.is_applied and not each.reads_advantages]
        entry = self.entry
        check(
            not self.batch_normalised or entry is None or (entry.is_applied and not entry.reads_advantages),
            "algorithm.correction.batch_normalised", self.batch_normalised,
            f"false with algorithm.correction.kind {self.kind}", f"Or set kind to one of {', '.join(kinds)}.",
        )

    @property
    def entry(self) -> Correction | None:
        """The `Correction` named by `kind`; None for auto, which Config.correction_kind resolves."""
        return None if self.kind == "auto" else find_entry(CORRECTIONS, self.kind, "algorithm.correction.kind")

    @property
    def is_asked_for(self) -> bool:
        """Whether the user chose a correction that multiplies the loss by weights; False for auto and none."""
        return self.entry is not None and self.entry.is_applied


@section("algorithm.kl")
class KlConfig:
    """A penalty that keeps the policy near the frozen reference model."""

    kind: Literal["none", "k1_reward", "k2_loss", "k3_loss"] = "none"
    """k1_reward subtracts each token's penalty from its reward, so earlier tokens answer for it too. k2_loss adds a
    penalty to the loss, with the gradient of each token's own KL alone. k3_loss adds one with the gradient of the other
    KL divergence, KL(reference || policy)."""
    coef: PositiveFloat = 1e-3
    """The coefficient of the penalty. Turn the penalty off by kl.kind: none."""
    target: NonNegativeFloat = 0.0
    """The KL to keep, in nats a token: the coefficient is adapted to it. 0: the coefficient stays fixed."""

    def __post_init__(self) -> None:
        check(
            self.target == 0 or self.kind != "none", "algorithm.kl.target", self.target,
            "0 with algorithm.kl.kind none", "There is no penalty to adapt. Set algorithm.kl.kind: k2_loss, say.",
        )


@section("algorithm")
class AlgorithmConfig:
    """How a batch becomes a loss: advantages, loss, correction, KL, and the passes over the batch."""

    preset: Annotated[
        str, checked(PRESETS.__contains__, "a preset"), Field(json_schema_extra={"enum": [*PRESETS]})
    ] = "grpo"
    """Sets all keys of this section that are not given; docs/reference/algorithms.md lists what each preset sets."""
    advantage: Annotated[str, Named(ADVANTAGES, "algorithm.advantage")] = "grpo"
    """How rewards become advantages. gae and vtrace train a critic; the others compare rewards."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The discount of rewards from one token to the next."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """The lambda of the advantages gae and vtrace."""
    whiten: bool = False
    """Subtract the mean of the advantages and divide by their standard deviation, both over the batch's trained
    tokens. The REINFORCE++ advantages are always whitened."""
    loss: Annotated[str, Named(LOSSES, "algorithm.loss")] = "ppo_clip"
    """The loss of the policy."""
    old_logprobs: Literal["recompute", "interpolate", "rollout"] = "recompute"
    """The policy in the denominator of the loss's ratio. recompute: the learner's policy at the start of the step
    (decoupled), which takes a forward pass with several optimizer steps a batch and in some other cases. interpolate:
    log-linear between behaviour and learner by version, without a forward pass. rollout: the policy that sampled the
    tokens (coupled)."""
    support: Literal["replay", "ignore"] = "replay"
    """What is recorded if rollout.top_p, top_k or min_p leave tokens out of sampling. replay: each token's support,
    the ids that it was drawn from; all logprobs, also those of learner and reference, are then over these ids. ignore:
    nothing; logprobs are over the whole vocabulary, so ratios are biased."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the losses of tokens are averaged. token_mean: over all trained tokens. sequence_mean: first over each
    episode's tokens, then over episodes. constant: their sum divided by episodes * rollout.max_response_tokens, or in
    multi-turn tasks by the longest length of an episode. An episode counts once, however many rows it has."""
    clip: Section[ClipConfig] = field(default_factory=ClipConfig)
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that the chosen loss, advantage and correction declare: tv and tv_pull for the loss dppo_tv, kl
    for dppo_kl, quantile for sat, cap for score_centering."""
    correction: Section[CorrectionConfig] = field(default_factory=CorrectionConfig)
    kl: Section[KlConfig] = field(default_factory=KlConfig)
    entropy_coef: NonNegativeFloat = 0.0
    """The coefficient of the entropy bonus. 0 turns it off."""
    router_aux_coef: NonNegativeFloat = 0.0
    """For a model with experts: the coefficient of the loss that balances their load, e.g. 1e-3. It takes a forward
    pass at the start of each step, to count the experts chosen in the whole minibatch. 0 turns it off."""
    ptx_coef: NonNegativeFloat = 0.0
    """The coefficient of the pretraining term (PPO-ptx): each optimizer step of the policy also lowers the mean -log
    p(token) of some text from task.pretrain_path. 0 turns it off."""
    ptx_rows: PositiveInt = 1
    """Rows of pretraining text for each episode of a minibatch. InstructGPT takes 8."""
    epochs: PositiveInt = 1
    """The number of passes of the learner over each batch."""
    num_minibatches: PositiveInt = 1
    """Parts into which a batch is split. A batch takes epochs * num_minibatches optimizer steps."""
    early_stop_kl: NonNegativeFloat = 0.0
    """If a minibatch's KL(proximal || learner) is above this, in nats a token, the policy skips the batch's
    remaining optimizer steps. A critic still takes all of its steps. 0 turns it off."""
    skip_batch_kl: NonNegativeFloat = 0.0
    """A batch whose KL(behaviour || proximal) is above this, in nats a token, is counted but not trained on. 0: off."""
    filter_zero_variance: bool = True
    """Drop and count groups whose rewards are all equal, because their advantages would be zero. An epoch of such
    groups in a row with the same reward (a solved or a hopeless task) ends the run, and so do thousands in a row with
    different rewards (no prompt's answers differ). It has no effect with advantages that do not compare a group's
    rewards (remax, reinforce_pp, gae, vtrace)."""

    def __post_init__(self) -> None:
        settings = self.settings.values()
        object.__setattr__(self, "params", {k: v for each in settings for k, v in dataclasses.asdict(each).items()})
        self._check_limits()
        self._check_proximal()
        self._check_advantage()
        self._check_loss()

    @property
    def steps_per_batch(self) -> int:
        """The number of optimizer steps per batch: epochs * num_minibatches."""
        return self.epochs * self.num_minibatches

    @property
    def advantage_entry(self) -> Advantage:
        """The `Advantage` named by `advantage`, in the table ADVANTAGES or as `module:name`."""
        return find_entry(ADVANTAGES, self.advantage, "algorithm.advantage")

    @property
    def loss_entry(self) -> Loss:
        """The `Loss` named by `loss`, in the table LOSSES or as `module:name`."""
        return find_entry(LOSSES, self.loss, "algorithm.loss")

    @property
    def whitens_at_start(self) -> bool:
        """Whether advantages depend on the forward passes at step start, and so are whitened only after them.

        That is so with a critic, and if a KL penalty is subtracted from rewards, as REINFORCE++ does before it whitens.
        Source: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.
        """
        entry = self.advantage_entry
        return (entry.whitens or self.whiten) and (entry.needs_critic or self.kl.kind == "k1_reward")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings objects made from `params`, by key and name of their part, such as `algorithm.loss ppo_clip`.

        Only a loss, advantage or correction that declares settings has an entry."""
        correction = self.correction.entry  # the corrections that `auto` stands for have no settings
        declared = {
            f"algorithm.advantage {self.advantage}": self.advantage_entry.settings,
            f"algorithm.loss {self.loss}": self.loss_entry.settings,
            f"algorithm.correction.kind {self.correction.kind}": correction.settings if correction else None,
        }
        return read_params("algorithm.params", self.params, declared)

    def load_advantage(self) -> Callable[..., Any]:
        """Import the function of `advantage`. Its settings, if it has any, are already bound."""
        return self._load(self.advantage_entry, f"algorithm.advantage {self.advantage}")

    def load_loss(self) -> Callable[..., Any]:
        """Import the function of `loss`. Its settings, if it has any, are already bound."""
        return self._load(self.loss_entry, f"algorithm.loss {self.loss}")

    def load_correction(self, entry: Correction) -> Callable[..., Any]:
        """Import the function of `correction.kind`, where auto stands for the kind that it is resolved to."""
        return self._load(entry, f"algorithm.correction.kind {self.correction.kind}")

    def _load(self, entry: Advantage | Loss | Correction, part: str) -> Callable[..., Any]:
        settings = self.settings.get(part)
        return partial(entry.load(), settings=settings) if settings else entry.load()

    def _check_limits(self) -> None:
        for name in ("early_stop_kl", "skip_batch_kl"):
            check(
                getattr(self, name) == 0 or self.old_logprobs != "interpolate",
                f"algorithm.{name}", getattr(self, name),
                "0 with algorithm.old_logprobs interpolate", "Interpolated logprobs don't show how far the policy is.",
            )
        check(
            self.early_stop_kl == 0 or self.steps_per_batch > 1, "algorithm.early_stop_kl", self.early_stop_kl,
            "0 with one optimizer step per batch", "Set algorithm.epochs or algorithm.num_minibatches above 1.",
        )

    def _check_proximal(self) -> None:
        kind, normalised, m2po = self.correction.kind, self.correction.batch_normalised, self.correction.masks.m2po
        check(
            self.old_logprobs != "interpolate" or self.steps_per_batch > 1, "algorithm.old_logprobs", self.old_logprobs,
            "recompute or rollout with one optimizer step per batch",
            "The forward pass of that step gives the proximal logprobs: there is no other pass to save.",
        )
        check(
            not normalised or self.old_logprobs == "recompute", "algorithm.correction.batch_normalised", normalised,
            f"false with algorithm.old_logprobs {self.old_logprobs}",
            "Weights of a whole minibatch need its proximal logprobs before its first step. Use recompute.",
        )
        check(
            self.old_logprobs != "interpolate" or m2po == 0, "algorithm.correction.masks.m2po", m2po,
            "0 with algorithm.old_logprobs interpolate",
            "The mask needs the proximal logprobs of a whole minibatch before its first step. Use recompute.",
        )
        check(
            self.old_logprobs != "interpolate" or not self.whitens_at_start, "algorithm.old_logprobs",
            self.old_logprobs,
            "recompute or rollout with whitened advantages of a critic or of algorithm.kl.kind k1_reward",
            "They are whitened before the first optimizer step, by a forward pass. Use recompute.",
        )
        check(
            self.old_logprobs != "rollout" or not self.correction.is_asked_for, "algorithm.correction.kind", kind,
            "auto or none with algorithm.old_logprobs rollout",
            "The ratio to the behaviour policy is in the loss: a weight would count it twice.",
        )

    def _check_advantage(self) -> None:
        entry, kind = self.advantage_entry, self.correction.kind
        discounting = [name for name, each in ADVANTAGES.items() if each.discounts]
        check(
            self.gamma == 1 or entry.discounts, "algorithm.gamma", self.gamma,
            f"1 with algorithm.advantage {self.advantage}", f"Only {', '.join(discounting)} discount.",
        )
        check(
            not entry.carries_correction or not self.correction.is_asked_for, "algorithm.correction.kind", kind,
            f"auto or none with algorithm.advantage {self.advantage}",
            "These advantages carry the truncated ratio already.",
        )
        check(
            not entry.carries_correction or self.old_logprobs != "rollout", "algorithm.old_logprobs", self.old_logprobs,
            f"recompute or interpolate with algorithm.advantage {self.advantage}",
            "These advantages carry the ratio to the behaviour policy already.",
        )
        check(
            not entry.aggregations or self.aggregation in entry.aggregations, "algorithm.aggregation",
            self.aggregation, f"{' or '.join(entry.aggregations)} with algorithm.advantage {self.advantage}",
            "The advantage assumes that each token weighs the same.",
        )

    def _check_loss(self) -> None:
        check(
            not self.loss_entry.needs_heads or self.old_logprobs == "rollout", "algorithm.old_logprobs",
            self.old_logprobs, f"rollout with algorithm.loss {self.loss}", "Its weights are ratios to the sampler.",
        )
        entry, one_ratio = self.loss_entry, self.loss_entry.needs_row_advantage
        others = ", ".join(name for name, each in LOSSES.items() if not each.needs_row_advantage)
        check(
            not one_ratio or (not self.advantage_entry.needs_critic and self.gamma == 1), "algorithm.loss", self.loss,
            f"one of {others} with algorithm.advantage {self.advantage} and gamma {self.gamma}",
            f"{self.loss} has one ratio a row, so it needs one advantage a row.",
        )
        check(
            not one_ratio or self.kl.kind != "k1_reward", "algorithm.kl.kind", self.kl.kind,
            f"none, k2_loss or k3_loss with algorithm.loss {self.loss}",
            "A penalty on the reward of each token gives each token an advantage of its own.",
        )
        check(
            not entry.aggregations or self.aggregation in entry.aggregations, "algorithm.aggregation",
            self.aggregation, f"{' or '.join(entry.aggregations)} with algorithm.loss {self.loss}",
            "The loss is not defined for another aggregation.",
        )
