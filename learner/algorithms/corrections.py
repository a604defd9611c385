"""Corrections for off-policy data as pure functions: weights that multiply the loss, masks that leave tokens out of it.

The input is log rho = proximal - behaviour logprobs of N sampled tokens, detached, in float32, and 0 where a token is
not trained. `rows` [N] is the index of each token's row, `count` the number of rows. A token that a mask drops still
counts in the normaliser, because otherwise the other tokens would get more weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.base.config import MasksConfig
from learner.algorithms.masked_ops import binary_kl, bounded_exp, mean_by_row, sum_by_row
from learner.packing import ResponseTokens


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
