"""Losses and off-policy corrections of each token as pure functions. The caller sums and normalises them.

A loss of the policy is a function `LossInputs -> LossOutput`; async_rl/base/seams/algorithms.py lists them. In the
formulas A is the advantage and r = exp(learner - centre logprobs). `low` and `high` come from algorithm.clip, further
settings from algorithm.params.

A correction is a weight that multiplies the loss, or a mask that leaves tokens out of it. Its input is log rho =
proximal - behaviour logprobs of N sampled tokens, detached, in float32, and 0 where a token is not trained. `rows` [N]
is the index of each token's row, `count` the number of rows. A token that a mask drops still counts in the normaliser,
because otherwise the other tokens would get more weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from async_rl.base.config import MasksConfig
from async_rl.base.config.algorithm import (
    ClipConfig,
    DppoKlSettings,
    DppoTvSettings,
    SatSettings,
    ScoreCenteringSettings,
)
from async_rl.base.errors import AsyncRLError
from async_rl.base.telemetry.metrics import OverSteps
from learner.packing import ResponseTokens

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp, so that no ratio overflows sums in float32."""
PROBABILITY_MARGIN = 1e-6
"""Binary KL divergences clamp probabilities this far from 0 and 1, as prime-rl does."""
SMALLEST_TAIL = 1e-6
"""The least probability outside of a head, so that the ratio of two tails is finite."""


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp(x), with x clamped to +-MAX_LOG_RATIO first. Any shape."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return D_B(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), in nats, from log-probabilities. Any shape.

    This is the KL divergence between two policies if all tokens but one are merged. Probabilities are clamped to
    [PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN]; NaN gives NaN. Source: DPPO, arXiv 2602.04879, the binary KL.
    """
    p, q = (x.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN) for x in (log_p, log_q))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def sum_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the sum of the values of each row's tokens. Values [N] and each token's row index [N] -> [count]."""
    return values.new_zeros(count).index_add(0, rows, values)


def mean_by_row(values: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the mean value of each row's trained tokens; 0 for a row without any. [N], [N] bool, [N] -> [count]."""
    tokens = sum_by_row(trained.to(values.dtype), rows, count).clamp(min=1)
    return sum_by_row(torch.where(trained, values, 0.0), rows, count) / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The most likely tokens ("head") of the distribution that each response token was drawn from: M for all N tokens.

    The sampled token may be one of them or not.
    """

    logprobs: Tensor  # [M] learner logprobs, with gradient
    behaviour: Tensor  # [M] logprobs with which the engine would have sampled them
    tokens: Tensor  # [M] int64 index, 0..N-1, of the response token at whose place they stand
    are_whole: bool
    """Each head is the whole support: its probabilities add up to 1 in both policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss: N response tokens of several rows. Logprobs are 0 where a token is not trained."""

    logprobs: Tensor  # [N] learner logprobs, with gradient
    centre: Tensor  # [N] logprobs that the ratio is taken to: proximal (decoupled) or behaviour (coupled)
    advantages: Tensor  # [N]
    trained: Tensor  # [N] bool
    rows: Tensor  # [N] int64 index of each token's row
    count: int
    """Number of rows."""
    clip: ClipConfig
    """algorithm.clip of the configuration."""
    heads: Heads | None = None
    """Only for a loss that declares `needs_heads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMetric:
    """A metric that a loss returns: a value for each token, and how to reduce the values. Only trained tokens count."""

    values: Tensor = field(kw_only=False)  # [N]
    reduce: Literal["mean", "sum", "max"] = "mean"
    """How the tokens of a step become one number."""
    over_steps: OverSteps | None = None
    """How the numbers of several steps become one; None: as `reduce`."""
    by: str = ""
    """For a mean over steps, the metric that weighs each step, such as `batch/response_tokens`; "": all steps weigh the
    same.
    """
    unit: str = ""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The output of a loss: the loss of each token, whether it was clipped, and metrics."""

    loss: Tensor  # [N] with gradient
    clipped: Tensor  # [N] bool: the loss held the token back, as by algorithm.clip
    metrics: Mapping[str, Tensor | TokenMetric] = field(default_factory=dict)
    """What the step logs as `loss/<name>`. A plain tensor [N] is logged as its mean over trained tokens. A loss must
    return the same names for every micro-batch."""


def ppo_clip_loss(x: LossInputs) -> LossOutput:
    """PPO's clipped loss of each token, with r = exp(learner - centre logprobs) and its advantage A:

        L = max(-r A, -clip(r, 1 - low, 1 + high) A)
        L = min(L, -dual * A)  where A < 0 and dual > 0

    `clipped` covers only the first line. With dual > 0 the metric `loss/dual_clip_fraction` is the share of trained
    tokens that the second line changes; these have no gradient either.

    Sources: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds, DAPO, arXiv 2503.14476;
    dual clip, Ye et al. 2019, arXiv 1912.09729, equation 5; centred on the proximal instead of the behaviour
    policy, Hilton et al. 2021, arXiv 2110.00641.
    """
    ratio = bounded_exp(x.logprobs - x.centre)
    output = _clipped(x, ratio, ratio.clamp(1 - x.clip.low, 1 + x.clip.high))
    if x.clip.dual == 0:
        return output
    bounded = torch.minimum(output.loss, -x.clip.dual * x.advantages)
    held = (x.advantages < 0) & (bounded < output.loss)
    loss = torch.where(x.advantages < 0, bounded, output.loss)
    return LossOutput(loss, output.clipped, {"dual_clip_fraction": held.double()})


def cispo_loss(x: LossInputs) -> LossOutput:
    """L = -w A log p, w = clip(r, 1 - low, 1 + high) without gradient: a clipped token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    ratio = bounded_exp(x.logprobs.detach() - x.centre)
    weight = ratio.clamp(1 - x.clip.low, 1 + x.clip.high)
    return LossOutput(-weight * x.advantages * x.logprobs, weight != ratio)


def gspo_loss(x: LossInputs) -> LossOutput:
    """PPO-clip with one ratio for all tokens of a row, the geometric mean of their ratios:

        s = exp(mean_t (learner - centre)),  L = max(-s A, -clip(s, 1 - low, 1 + high) A)

    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, equations 5 and 7.
    """
    means = mean_by_row(x.logprobs - x.centre, x.trained, x.rows, x.count)
    ratio = bounded_exp(means)[x.rows]
    return _clipped(x, ratio, ratio.clamp(1 - x.clip.low, 1 + x.clip.high))


def dppo_tv_loss(x: LossInputs, settings: DppoTvSettings) -> LossOutput:
    """L = -keep r A + tv_pull (log r)^2, where keep is 1 or 0.

    keep is 0 for a token whose probability has moved from the centre's by more than `tv` in the direction of its
    advantage. Rare tokens are kept: their ratios are large, but their probability hardly changes.

    Source: prime-rl's default loss (DPPO, binary total variation).
    """
    log_ratio = x.logprobs - x.centre
    change = (x.logprobs.exp() - x.centre.exp()).detach()
    dropped = torch.where(x.advantages > 0, change > settings.tv, (x.advantages < 0) & (change < -settings.tv))
    loss = torch.where(dropped, 0.0, -bounded_exp(log_ratio) * x.advantages)
    return LossOutput(loss + settings.tv_pull * log_ratio.square(), dropped)


def dppo_kl_loss(x: LossInputs, settings: DppoKlSettings) -> LossOutput:
    """L = -keep r A, where keep is 1 or 0.

    r is the learner's probability of a token over the probability by the centre, which is the behaviour or proximal
    policy. keep is 0 for a token whose ratio has moved in the direction of its advantage until the binary KL
    D_B(centre || learner) is above `kl`.

    Source: DPPO, arXiv 2602.04879, the variant with binary KL.
    """
    log_ratio = x.logprobs - x.centre
    away = torch.where(x.advantages > 0, log_ratio > 0, (x.advantages < 0) & (log_ratio < 0))
    dropped = away & (binary_kl(x.centre, x.logprobs.detach()) > settings.kl)
    return LossOutput(torch.where(dropped, 0.0, -bounded_exp(log_ratio) * x.advantages), dropped)


def sat_loss(x: LossInputs, settings: SatSettings) -> LossOutput:
    """PPO's clipped loss with a smaller interval for the tokens that are furthest from the centre:

        d = log r without gradient,  Q = the quantile of |d| over the trained tokens of the micro-batch
        c = 1 where |d| <= Q or Q = 0, else 1 / (1 + (|d| / Q)^2)
        L = max(-r A, -clip(r, 1 - low c, 1 + high) A) where d < 0, max(-r A, -clip(r, 1 - low, 1 + high c) A) else

    So the interval is never wider than PPO's. Q depends on how rows are packed into micro-batches. Source: SAT, arXiv
    2607.18722; the paper names a Hill kernel, and c is the one with exponent 2.
    """
    log_ratio = x.logprobs - x.centre
    d = log_ratio.detach()
    size = torch.where(x.trained, d.abs(), 0.0)
    of_trained = size[x.trained]
    limit = of_trained.quantile(settings.quantile) if len(of_trained) else size.new_zeros(())
    shrinks = (size > limit) & (limit > 0)
    kernel = torch.where(shrinks, 1 / (1 + (size / limit.clamp_min(1e-30)).square()), 1.0)
    low = x.clip.low * torch.where(d < 0, kernel, 1.0)
    high = x.clip.high * torch.where(d > 0, kernel, 1.0)
    ratio = bounded_exp(log_ratio)
    return _clipped(x, ratio, ratio.clamp(1 - low, 1 + high))


def score_centering_loss(x: LossInputs, settings: ScoreCenteringSettings) -> LossOutput:
    """The policy gradient less its expectation over the sampler, for each token with head H:

        L = -A (w log p - sum_{v in H} c_v log p_v),   w and c without gradient
        w_v = min(p_v / q_v, cap), or 1 with cap 0
        c_v = q_v w_v - alpha p_v,  alpha = min(1, cap rho), or rho with cap 0,  rho = (1 - sum_H q) / (1 - sum_H p)

    q is the centre. The tail outside of H is taken as q_v = rho p_v; heads that are whole have none, so alpha is 0.
    The gradient of E_q[A w log p] is E_q[A] E_q[w grad log p] plus a covariance. The first part is drift that no reward
    has asked for, and the sum over H cancels it. `clipped` are tokens with p / q above `cap`.

    Source: score centering, Marek and Ryabinin 2026, arXiv 2609.20807.
    """
    assert x.heads is not None
    heads, count, cap = x.heads, len(x.logprobs), settings.cap
    p, q = heads.logprobs.detach().exp(), heads.behaviour.exp()
    ratio = bounded_exp(x.logprobs.detach() - x.centre)
    weights = ratio.clamp(max=cap) if cap else torch.ones_like(ratio)
    coefficients = torch.minimum(p, cap * q) if cap else q
    if not heads.are_whole:
        tails = [(1 - sum_by_row(each, heads.tokens, count)).clamp(min=SMALLEST_TAIL) for each in (q, p)]
        rho = tails[0] / tails[1]
        coefficients = coefficients - ((cap * rho).clamp(max=1) if cap else rho)[heads.tokens] * p
    expected = sum_by_row(coefficients * heads.logprobs, heads.tokens, count)
    clipped = ratio > cap if cap else torch.zeros_like(x.trained)
    return LossOutput(-x.advantages * (weights * x.logprobs - expected), clipped)


def _clipped(x: LossInputs, ratio: Tensor, held: Tensor) -> LossOutput:
    plain, bounded = -ratio * x.advantages, -held * x.advantages
    return LossOutput(torch.maximum(plain, bounded), bounded > plain)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Clipped squared error of the critic: max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2. [N]

    V_old is the value at step start; clip 0 turns clipping off. Source: the value clipping of OpenAI baselines' ppo2.
    """
    error = (values - returns).square()
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * error


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """k1 = log p - log q. Its mean over samples of p estimates KL(p || q) without bias; it may be negative.

    Use it in rewards, not as a loss: its gradient has mean zero. Source: Schulman 2020, "Approximating KL Divergence".

    Args:
        logprobs, other: log p and log q of the sampled tokens. Any shape.
    """
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """k2 = (log p - log q)^2 / 2: over samples of p a biased estimate of KL(p || q), but with its gradient.

    Source and arguments: as for k1; tests/vectors.json (`kl_expected_gradient`) has gradients.
    """
    return 0.5 * (logprobs - other).square()


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """k3 = q / p - 1 - log(q / p) >= 0. Over samples of p it has no bias, like k1, and less variance.

    As a loss it has the gradient of the other divergence, KL(q || p). Source and arguments: as for k1.
    """
    log_ratio = other - logprobs
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - log_ratio


def check_output(output: LossOutput, name: str, trained: Tensor) -> None:
    """Check that the tensors a loss returned have one value per token. Other shapes would be summed wrongly, unnoticed.

    Args:
        name: the loss, for the message.
        trained: [N], whose shape is required.

    Raises:
        AsyncRLError: a tensor is not [N].
    """
    metrics = {
        f"metrics[{name!r}]": each.values if isinstance(each, TokenMetric) else each
        for name, each in output.metrics.items()
    }
    for part, value in {"loss": output.loss, "clipped": output.clipped, **metrics}.items():
        if getattr(value, "shape", None) != trained.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.50}"
            raise AsyncRLError(
                f"algorithm.loss {name}: {part} of its LossOutput must be a tensor with a value for each token, "
                f"[{len(trained)}], got {got}. The caller sums over tokens and divides"
            )


def log_ratios(proximal: Tensor, behaviour: Tensor, trained: Tensor) -> Tensor:
    """Return log rho = proximal - behaviour logprobs of the trained tokens, 0 elsewhere. [N]

    rho is the importance weight that corrects for sampling with the behaviour policy.

    Source: decoupled PPO, Hilton et al. 2021, arXiv 2110.00641.
    """
    return torch.where(trained, proximal.detach().float() - behaviour.float(), 0.0)


def token_weights(log_rho: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the importance weight of each token: rho_t = its proximal / its behaviour probability. [N]

    It has the least variance, but a bias: the tokens before and after it, on which its advantage depends, are still
    the behaviour policy's.

    Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008,
    "Truncated importance sampling".
    """
    return bounded_exp(log_rho)


def sequence_weights(log_rho: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the product of rho over the row of each token. [N]

    It has no bias with an unbiased advantage, no cap, floor or mask, and no clip that acts. Its variance grows with the
    length.

    Source: as for token_weights.
    """
    return bounded_exp(sum_by_row(log_rho, rows, count))[rows]


def geometric_weights(log_rho: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return (prod rho)^(1 / length), the geometric mean of rho over the trained tokens of each token's row. [N]"""
    return bounded_exp(mean_by_row(log_rho, trained, rows, count))[rows]


def topr_weights(log_rho: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the weight 1 where A >= 0, and min(prod rho, 1) over the row where A < 0. [N]

    Source: TOPR, Le Roux et al. 2025, arXiv 2503.14286.
    """
    products = sequence_weights(log_rho, advantages, trained, rows, count)
    return torch.where(advantages < 0, products.clamp(max=1), 1.0)


def dropped_tokens(
    masks: MasksConfig, log_rho: Tensor, behaviour: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor,
    count: int,
) -> Tensor:
    """Return a bool [N]: True for tokens that a mask of `masks` leaves out of the loss. M2PO is not applied here.

    `MasksConfig` says what each mask does. `behaviour` [N] are the behaviour logprobs, 0 where a token is not trained.

    A NaN is never dropped: it must reach the loss, where it is noticed.

    Sources: token, IcePop (Ring-1T, arXiv 2510.18855); kpop, KPop (Guo et al. 2026, Ant Group); sequence and geometric,
    Liu et al. 2025, "When speed kills stability"; opsm, DeepSeek-V3.2's off-policy sequence masking; veto, slime's
    rs_veto_threshold.
    """
    rho = bounded_exp(log_rho)
    means = mean_by_row(log_rho, trained, rows, count)
    products = bounded_exp(sum_by_row(log_rho, rows, count))
    whole = _outside(products, masks.sequence) | _outside(bounded_exp(means), masks.geometric)
    if masks.veto > 0:
        whole |= sum_by_row((rho < masks.veto).float(), rows, count) > 0
    dropped = _outside(rho, masks.token) | whole[rows]
    if masks.kpop > 0:
        proximal = behaviour + log_rho
        both = torch.maximum(binary_kl(proximal, behaviour), binary_kl(behaviour, proximal))
        dropped |= trained & (both > masks.kpop)
    if masks.opsm > 0:
        dropped |= (advantages < 0) & (means < -masks.opsm)[rows]
    return dropped


def m2po_limit(squares: Tensor, places: Tensor, tau: float) -> tuple[float, int]:
    """Return (square, place) of the last token that M2PO keeps, ordered by square and, where equal, by place.

    M2PO drops the largest squares until the mean of the rest is below tau; one token is always kept.
    Source: M2PO, arXiv 2510.01161, algorithm 1.

    Args:
        squares: [M] the (log rho)^2 of all trained tokens of the minibatch.
        places: [M] the places of these tokens in the batch, all different.
    """
    if not len(squares):
        return 0.0, 0
    order = places.argsort()
    order = order[squares[order].argsort(stable=True)]
    ascending = squares[order].double()
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    last = max(int((means < tau).sum()), 1) - 1  # the means ascend too
    return float(ascending[last]), int(places[order[last]])


def beyond_m2po(log_rho: Tensor, places: Tensor, limit: tuple[float, int]) -> Tensor:
    """Return a bool [N]: True for the tokens that M2PO drops, which come after `limit` in the order of `m2po_limit`.

    A NaN is never dropped.
    """
    squares = log_rho.square()
    return (squares > limit[0]) | ((squares == limit[0]) & (places > limit[1]))


def interpolated_proximal(logprobs: Tensor, behaviour: Tensor, staleness: Tensor) -> Tensor:
    """Return proximal logprobs [N] interpolated between behaviour and learner logprobs, detached. No forward pass.

        log p_prox = log p_behaviour + alpha (log p_learner - log p_behaviour)
        alpha = (v_prox - v_behaviour) / (v_learner - v_behaviour) = staleness / (staleness + 1)

    The learner is moving from version v_prox to v_prox + 1. Source: A-3PO, arXiv 2512.06547.

    Args:
        logprobs: [N] the present learner logprobs.
    """
    alpha = staleness / (staleness + 1)
    return behaviour + alpha * (logprobs.detach() - behaviour)


def _outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values < bounds[0]) | (values > bounds[1])


def weight_sums(log_rho: Tensor, response: ResponseTokens, by_sequence: bool) -> Tensor:
    """Return [sum w, sum w^2, N] of the importance weights of a micro-batch, in float64. Add them up over the batch.

    Args:
        log_rho: [N] proximal - behaviour logprobs, 0 where not trained.
        by_sequence: True: one weight for each row with trained tokens, the product over these. False: one weight for
            each trained token.
    """
    if by_sequence:
        count = len(response.lengths)
        counts = sum_by_row(response.trained.double(), response.rows, count) > 0
        weights = bounded_exp(sum_by_row(log_rho, response.rows, count)).double()
    else:
        counts, weights = response.trained, bounded_exp(log_rho).double()
    weights = torch.where(counts, weights, 0.0)
    return torch.stack([weights.sum(), weights.square().sum(), counts.sum().double()])


def step_scale(sum_of_weights: float, sum_of_squares: float, number: float) -> float:
    """Return the factor of the learning rate for a batch: sqrt(ESS / N) = sum w / sqrt(N sum w^2).

    It is 1 without any weight, and if a weight is not a number: that row's step is skipped, and the others keep theirs.

    Source: VCPO, arXiv 2602.17616. A weighted mean over N samples has the standard error of a mean over ESS samples, so
    the batch gets the learning rate of ESS samples: with Adam lr * sqrt(ESS / N).

    Args:
        sum_of_weights, sum_of_squares, number: sum w, sum w^2 and N of `weight_sums`, added up over the batch.
    """
    is_known = sum_of_squares > 0 and math.isfinite(sum_of_weights) and math.isfinite(sum_of_squares)
    return sum_of_weights / math.sqrt(number * sum_of_squares) if is_known else 1.0
