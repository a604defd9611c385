"""What multiplies the loss, or leaves tokens out of it, for being off-policy: one weight rule, any number of masks.

All work on log rho = proximal - behaviour logprobs of the sampled tokens, detached, in float32, 0 where a token is not
trained. A token that a mask drops still counts in the normaliser, else dropping tokens would raise the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.config import MasksConfig
from learner.algorithms.masked_ops import bounded_exp, mean_by_answer, sum_by_answer


def log_ratios(proximal: Tensor, behaviour: Tensor, trained: Tensor) -> Tensor:
    """log rho of the trained tokens, 0 elsewhere. [N]; rho turns samples of the behaviour policy into the proximal's.

    Source: decoupled PPO, Hilton et al. 2021, arXiv 2110.00641.
    """
    return torch.where(trained, proximal.detach().float() - behaviour.float(), 0.0)


def importance_weights(
    kind: str,
    log_rho: Tensor,  # [N]
    advantages: Tensor,  # [N]
    trained: Tensor,  # [N] bool
    answers: Tensor,  # [N] index of each token's answer
    count: int,
) -> Tensor:
    """The weight of each token before it is held in [floor, cap]. [N]

        none           1
        token_tis      rho_t                        biased by the prefix, of least variance
        sequence_tis   prod rho over the answer     unbiased, its variance grows with the length
        geometric_tis  (prod rho)^(1 / length)      the answer's mean drift
        topr           1 where A >= 0, min(prod rho, 1) where A < 0

    Sources: token and sequence TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training", and Ionides 2008, "Truncated importance sampling"; TOPR, Le Roux et al. 2025, arXiv 2503.14286.
    """
    if kind == "none":
        return torch.ones_like(log_rho)
    if kind == "token_tis":
        return bounded_exp(log_rho)
    if kind == "geometric_tis":
        return bounded_exp(mean_by_answer(log_rho, trained, answers, count))[answers]
    products = bounded_exp(sum_by_answer(log_rho, answers, count))[answers]
    return products if kind == "sequence_tis" else torch.where(advantages < 0, products.clamp(max=1), 1.0)


def dropped_tokens(
    masks: MasksConfig,
    log_rho: Tensor,  # [N]
    advantages: Tensor,  # [N]
    trained: Tensor,  # [N] bool
    answers: Tensor,  # [N]
    count: int,
    m2po_limit: float = math.inf,
) -> Tensor:
    """The tokens that some mask drops, a bool [N]. What each mask does: `MasksConfig`. A NaN is never dropped: it
    has to reach the loss, where it is noticed.

    Sources: token, IcePop (Ring-1T, arXiv 2510.18855); sequence and geometric, Liu et al. 2025, "When speed kills
    stability"; m2po, arXiv 2510.01161, with `m2po_limit` of the whole minibatch; opsm, DeepSeek-V3.2's off-policy
    sequence masking; veto, slime's rs_veto_threshold.
    """
    rho = bounded_exp(log_rho)
    means = mean_by_answer(log_rho, trained, answers, count)
    products = bounded_exp(sum_by_answer(log_rho, answers, count))
    dropped = _outside(rho, masks.token) | (log_rho.square() > m2po_limit)
    whole = _outside(products, masks.sequence) | _outside(bounded_exp(means), masks.geometric)
    if masks.veto > 0:
        whole |= sum_by_answer((rho < masks.veto).float(), answers, count) > 0
    if masks.opsm > 0:
        dropped |= (advantages < 0) & (means < -masks.opsm)[answers]
    return dropped | whole[answers]


def m2po_limit(
    squares: Tensor,  # [M] (log rho)^2 of all trained tokens of the minibatch
    tau: float,
) -> float:
    """The largest (log rho)^2 to keep: the largest are dropped until the mean of the rest is below tau.

    One token always stays. Source: M2PO, arXiv 2510.01161, algorithm 1.
    """
    ascending = squares.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    kept = int((means < tau).sum())  # the means ascend too
    return float(ascending[max(kept, 1) - 1]) if len(ascending) else 0.0


def interpolated_proximal(
    logprobs: Tensor,  # [N] learner logprobs now
    behaviour: Tensor,  # [N]
    staleness: Tensor,  # [N] of each token
) -> Tensor:
    """Proximal logprobs without a forward pass of their own; detached. [N]

        log p_prox = log p_behaviour + alpha (log p_learner - log p_behaviour)
        alpha = (v_prox - v_behaviour) / (v_learner - v_behaviour) = staleness / (staleness + 1)

    The learner is on its way from version v_prox to v_prox + 1. Source: A-3PO, arXiv 2512.06547.
    """
    alpha = staleness / (staleness + 1)
    return behaviour + alpha * (logprobs.detach() - behaviour)


def _outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values < bounds[0]) | (values > bounds[1])
