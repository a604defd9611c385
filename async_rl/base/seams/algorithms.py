"""The tables of advantages, losses and corrections. docs/reference/algorithms.md has formulas and sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_rl.base.seams.lookup import implementation

Code = str | Callable[..., Any]
"""A function or class, or its `module:name`."""


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """A rule that computes advantages from rewards. Exactly one of the five functions is set.

    The arrays [k, T] have k rows, padded to T tokens.

    of_group: rewards [G] of one group -> advantages [G], the same for each token of a row.
    of_group_and_lengths: (rewards [G], trained tokens [G] of each answer) -> advantages [G].
    of_group_and_baseline: (rewards [G], reward of a greedy answer) -> advantages [G]; the worker samples that answer.
    of_tokens: (token rewards [k, T], values [k, T], log ratios proximal - behaviour [k, T], mask [k, T], gamma, lam)
        -> (advantages [k, T], value targets [k, T]); a critic is trained.
    of_returns: (token rewards [k, T], mask [k, T], gamma) -> advantages [k, T].
    """

    of_group: Code | None = None
    of_group_and_lengths: Code | None = None
    of_group_and_baseline: Code | None = None
    of_tokens: Code | None = None
    of_returns: Code | None = None
    compares_group: bool = False
    """Rewards are compared within the group, so a group needs two rows, and equal rewards give zeros."""
    discounts: bool = False
    """Rewards are discounted, so algorithm.gamma may be below 1."""
    whitens: bool = False
    """Advantages are always whitened over the batch's trained tokens. Other rules whiten only with algorithm.whiten."""
    carries_correction: bool = False
    """The advantages contain the truncated ratio to the behaviour policy already, so no correction is applied."""
    settings: Code | None = None
    """The class of the function's settings, set under algorithm.params: see Loss.settings."""
    reads_ratios: bool = True
    """`of_tokens` reads the log ratios. If it does not, the critic may be trained before the policy's forward
    pass, so that the activations of the two are not in memory simultaneously."""
    aggregations: tuple[str, ...] = ()
    """The values of algorithm.aggregation that work with the rule; empty: all."""
    has_traces: bool = False
    """A reward reaches earlier tokens with the factor lam * min(1, rho) per token, which the metric
    `vtrace/reach` reports."""

    @property
    def needs_critic(self) -> bool:
        return self.of_tokens is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.of_group_and_baseline is not None

    def load(self) -> Callable[..., Any]:
        of_group = self.of_group or self.of_group_and_lengths or self.of_group_and_baseline
        code = of_group or self.of_tokens or self.of_returns
        assert code is not None
        return implementation(code, "algorithm.advantage")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of the policy. `function` maps LossInputs to LossOutput: see learner/algorithms/losses.py."""

    function: Code
    needs_heads: bool = False
    """The loss reads `LossInputs.heads`: the logprobs of all ids in each token's support, by the learner and by
    the sampler. So rollout.top_p, top_k or min_p must leave tokens out, and algorithm.old_logprobs must be rollout."""
    needs_row_advantage: bool = False
    """All tokens of a row must have the same advantage: no critic, no discount, no penalty on single tokens, and
    no returns of an environment's episodes, whose turns have their own rewards."""
    aggregations: tuple[str, ...] = ()
    """The values of algorithm.aggregation that work with the loss; empty: all."""
    settings: Code | None = None
    """A class with the decorator `section("algorithm.params")` of async_rl.base.config.section. Its fields are
    settings under algorithm.params, and the function gets an instance of it as the argument `settings`. None: no
    settings."""

    def load(self) -> Callable[..., Any]:
        return implementation(self.function, "algorithm.loss")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A rule that computes the importance weight of each token.

    algorithm.correction then clamps the weights to [floor, cap].

    function: (log rho [N], advantages [N], trained [N] bool, rows [N] index of each token's row, number of
        rows) -> weights [N] of N tokens; rho is proximal / behaviour, and log rho is 0 where a token is not trained.
    """

    function: Code
    is_applied: bool = True
    """The weights multiply the loss. False: they are only used for the metric `offpolicy/truncated_fraction`."""
    reads_advantages: bool = False
    """The weights depend on the advantages, so they can't be normalised before the losses are computed."""
    settings: Code | None = None
    """The class of the function's settings, set under algorithm.params: see Loss.settings."""

    def load(self) -> Callable[..., Any]:
        return implementation(self.function, "algorithm.correction.kind")


_ADVANTAGES = "learner.algorithms.advantages"
ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(of_group=f"{_ADVANTAGES}:grpo", compares_group=True),
    "dr_grpo": Advantage(of_group=f"{_ADVANTAGES}:dr_grpo", compares_group=True),
    "rloo": Advantage(of_group=f"{_ADVANTAGES}:rloo", compares_group=True),
    "maxrl": Advantage(of_group=f"{_ADVANTAGES}:maxrl", compares_group=True),
    "opo": Advantage(
        of_group_and_lengths=f"{_ADVANTAGES}:opo", compares_group=True, aggregations=("token_mean", "constant")
    ),
    "remax": Advantage(of_group_and_baseline=f"{_ADVANTAGES}:remax"),
    "reinforce_pp": Advantage(of_returns=f"{_ADVANTAGES}:returns_to_go", discounts=True, whitens=True),
    "reinforce_pp_baseline": Advantage(of_group=f"{_ADVANTAGES}:dr_grpo", compares_group=True, whitens=True),
    "gae": Advantage(of_tokens=f"{_ADVANTAGES}:gae", discounts=True, reads_ratios=False),
    "vtrace": Advantage(of_tokens=f"{_ADVANTAGES}:vtrace", discounts=True, carries_correction=True, has_traces=True),
}

_LOSSES = "learner.algorithms.losses"
LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(function=f"{_LOSSES}:ppo_clip_loss"),
    "cispo": Loss(function=f"{_LOSSES}:cispo_loss"),
    "gspo": Loss(function=f"{_LOSSES}:gspo_loss", needs_row_advantage=True, aggregations=("sequence_mean",)),
    "dppo_tv": Loss(
        function=f"{_LOSSES}:dppo_tv_loss", settings="async_rl.base.config.algorithm:DppoTvSettings"
    ),
    "dppo_kl": Loss(
        function=f"{_LOSSES}:dppo_kl_loss", settings="async_rl.base.config.algorithm:DppoKlSettings"
    ),
    "score_centering": Loss(
        function=f"{_LOSSES}:score_centering_loss", needs_heads=True,
        settings="async_rl.base.config.algorithm:ScoreCenteringSettings",
    ),
    "sat": Loss(function=f"{_LOSSES}:sat_loss", settings="async_rl.base.config.algorithm:SatSettings"),
}

CORRECTIONS: dict[str, Correction] = {
    "none": Correction(function=f"{_LOSSES}:token_weights", is_applied=False),
    "token_tis": Correction(function=f"{_LOSSES}:token_weights"),
    "sequence_tis": Correction(function=f"{_LOSSES}:sequence_weights"),
    "geometric_tis": Correction(function=f"{_LOSSES}:geometric_weights"),
    "topr": Correction(function=f"{_LOSSES}:topr_weights", reads_advantages=True),
}
