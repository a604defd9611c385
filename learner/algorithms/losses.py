"""Per-token losses as pure functions. The caller sums them and divides by the normaliser of the minibatch.

`centre` is the policy that a ratio is taken to: the proximal one (decoupled) or the behaviour policy (coupled).
A policy loss returns (loss [N], clipped [N] bool: its clip acted on the token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.masked_ops import bounded_exp, mean_by_answer

PolicyLoss = tuple[Tensor, Tensor]


def ppo_clip_loss(
    logprobs: Tensor,  # [N] learner logprobs, with gradient
    centre: Tensor,  # [N]
    advantages: Tensor,  # [N]
    low: float,
    high: float,
    dual: float,
) -> PolicyLoss:
    """Clipped loss, r = exp(learner - centre):

        L = max(-r A, -clip(r, 1 - low, 1 + high) A)
        L = min(L, -dual * A)  where A < 0 and dual > 0

    Sources: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds, DAPO, arXiv 2503.14476;
    dual clip, Ye et al. 2019, arXiv 1912.09729, equation 5; centred on the proximal instead of the behaviour
    policy, Hilton et al. 2021, arXiv 2110.00641.
    """
    ratio = bounded_exp(logprobs - centre)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if dual > 0:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss, bounded > plain


def cispo_loss(
    logprobs: Tensor,  # [N]
    centre: Tensor,  # [N]
    advantages: Tensor,  # [N]
    low: float,
    high: float,
) -> PolicyLoss:
    """L = -w A log p, w = clip(r, 1 - low, 1 + high) without gradient: a clipped token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    ratio = bounded_exp(logprobs.detach() - centre)
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs, weight != ratio


def gspo_loss(
    logprobs: Tensor,  # [N]
    centre: Tensor,  # [N]
    advantages: Tensor,  # [N] equal within an answer
    trained: Tensor,  # [N] bool
    answers: Tensor,  # [N] index of each token's answer
    count: int,
    low: float,
    high: float,
) -> PolicyLoss:
    """PPO-clip with one ratio an answer, the geometric mean of its tokens', which every token of it carries:

        s = exp(mean_t (learner - centre)),  L = max(-s A, -clip(s, 1 - low, 1 + high) A)

    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, equations 5 and 7.
    """
    ratio = bounded_exp(mean_by_answer(logprobs - centre, trained, answers, count))[answers]
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(plain, bounded), bounded > plain


def dppo_tv_loss(
    logprobs: Tensor,  # [N]
    centre: Tensor,  # [N]
    advantages: Tensor,  # [N]
    max_change: float,
    pull: float,
) -> PolicyLoss:
    """L = -keep r A + pull (log r)^2: a token is dropped once its probability has moved by more than `max_change`
    in the direction of its advantage. Rare tokens, whose ratios are large while their probability hardly changes, stay.

    Source: prime-rl's default loss (DPPO, binary total variation).
    """
    log_ratio = logprobs - centre
    change = (logprobs.exp() - centre.exp()).detach()
    dropped = torch.where(advantages > 0, change > max_change, (advantages < 0) & (change < -max_change))
    loss = torch.where(dropped, 0.0, -bounded_exp(log_ratio) * advantages)
    return loss + pull * log_ratio.square(), dropped


def value_loss(
    values: Tensor,  # [N] of the critic now, with gradient
    old_values: Tensor,  # [N] of the critic at step start
    returns: Tensor,  # [N]
    clip: float,
) -> Tensor:
    """Clipped squared error: max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2.

    clip 0 turns clipping off.

    Source: the value clipping of OpenAI baselines' ppo2.

    Returns:
        [N].
    """
    error = (values - returns).square()
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * error


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """k1 = log p - log q, whose mean over samples of p estimates KL(p || q) without bias; may be negative.

    For the reward, not for a loss: its gradient has mean zero. Source: Schulman 2020, "Approximating KL Divergence".
    """
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """k2 = (log p - log q)^2 / 2: a biased estimate whose gradient is that of KL(p || q), over samples of p.

    Source: as for k1; gradients in vectors.json, `kl_expected_gradient`.
    """
    return 0.5 * (logprobs - other).square()


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """k3 = q / p - 1 - log(q / p) >= 0: over samples of p as unbiased as k1, with less variance.

    As a loss its gradient is that of the other divergence, KL(q || p). Source: as for k1.
    """
    log_ratio = other - logprobs
    return bounded_exp(log_ratio) - 1 - log_ratio
