"""Makes the step of the policy smaller where few samples carry a batch, as its effective sample size tells.

Source: VCPO, arXiv 2602.17616. The standard error of a weighted mean over N samples is that of ESS of them, so it takes
the learning rate that a batch of ESS samples would get: with Adam lr * sqrt(ESS / N).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.masked_ops import bounded_exp, sum_by_row
from learner.packing.microbatches import ResponseTokens


def weight_sums(log_rho: Tensor, response: ResponseTokens, by_sequence: bool) -> Tensor:
    """Return [sum w, sum w^2, N] of the importance weights of a micro-batch, in float64. They add up over the batch.

    Args:
        log_rho: [N] proximal - behaviour logprobs, 0 where not trained.
        by_sequence: a weight is the product over a row's trained tokens, and rows without any don't count. Otherwise
            each trained token has one.
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
    """Return the share of the learning rate: sqrt(ESS / N) = sum w / sqrt(N sum w^2); 1 without any weight.

    It is 1 also if a weight is not a number: the steps of such rows are skipped, and that of others must not be lost.
    """
    is_known = sum_of_squares > 0 and math.isfinite(sum_of_weights) and math.isfinite(sum_of_squares)
    return sum_of_weights / math.sqrt(number * sum_of_squares) if is_known else 1.0
