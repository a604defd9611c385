"""Losses of each token as pure functions. The caller sums them and divides by the normaliser of the minibatch.

A loss of the policy is a function `LossInputs -> LossOutput`; async_rl/base/seams/algorithms.py lists them. In the
formulas A is the advantage and r = exp(learner - centre logprobs). `low` and `high` come from algorithm.clip, further
settings from algorithm.params.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from async_rl.base.config.algorithm import (
    ClipConfig,
    DppoKlSettings,
    DppoTvSettings,
    SatSettings,
    ScoreCenteringSettings,
)
from async_rl.base.errors import AsyncRLError
from async_rl.base.telemetry.metrics import OverSteps
from learner.algorithms.masked_ops import MAX_LOG_RATIO, binary_kl, bounded_exp, mean_by_row, sum_by_row

SMALLEST_TAIL = 1e-6
"""The least probability outside of a head, so that the ratio of two tails is finite."""


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


CALIBRATION_BINS = 10


def bradley_terry(
    preferred: Tensor,  # [n] rewards of the preferred answers
    other: Tensor,  # [n] rewards of the answers to which they were preferred
    margins: Tensor,  # [n] differences of the rewards that are demanded
    weights: Tensor,  # [n]
    centering: float,
) -> Tensor:
    """Return sum_i w_i (-log sigmoid(r_i - r'_i - m_i) + centering (r_i + r'_i)^2), with gradient.

    The Bradley-Terry model: answer i is preferred to answer j with probability sigmoid(r_i - r_j).
    A pair of a ranking of K answers has the weight 1 / (number of its pairs), so that long rankings count no more than
    single pairs. Sources: Ouyang et al. 2022, arXiv 2203.02155, section 3.5; the margin Touvron et al. 2023, arXiv
    2307.09288, section 3.2.2; centering Eisenstein et al. 2023, arXiv 2312.09244.
    """
    losses = -F.logsigmoid(preferred - other - margins)
    if centering:
        losses = losses + centering * (preferred + other).square()
    return (weights * losses).sum()


def comparison_metrics(preferred: Tensor, other: Tensor, weights: Tensor) -> dict[str, float]:
    """Return how well rewards [n] of compared answers agree with the comparisons: four means, weighted by `weights`.

    loss: -log sigmoid(d), where d is the preferred answer's reward minus the other's.
    accuracy: the share with d > 0; d = 0 counts half.
    margin: the mean of d.
    calibration_error: in ten bins of the confidence sigmoid(|d|), from 0.5 to 1, the distance between mean confidence
        and accuracy; the mean over all pairs. Source: Guo et al. 2017, arXiv 1706.04599, section 2.
    """
    d, share = (preferred - other).double(), weights.double() / weights.double().sum()
    right = (d > 0).double() + 0.5 * (d == 0).double()
    confidence = torch.sigmoid(d.abs()).nan_to_num(0.5)  # whoever trains on NaN is told so by the weights
    bins = ((confidence - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, bins, share * (confidence - right))
    return {
        "loss": float((share * -F.logsigmoid(d)).sum()), "accuracy": float((share * right).sum()),
        "margin": float((share * d).sum()), "calibration_error": float(gaps.abs().sum()),
    }
