"""The loss by which a reward model learns comparisons, and measures of how well its rewards agree with comparisons.

The Bradley-Terry model: answer i is preferred to answer j with probability sigmoid(r_i - r_j).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CALIBRATION_BINS = 10


def bradley_terry(
    preferred: Tensor,  # [n] rewards of the preferred answers
    other: Tensor,  # [n] rewards of the answers to which they were preferred
    margins: Tensor,  # [n] differences of the rewards that are demanded
    weights: Tensor,  # [n]
    centering: float,
) -> Tensor:
    """Return sum_i w_i (-log sigmoid(r_i - r'_i - m_i) + centering (r_i + r'_i)^2), with gradient.

    A pair of a ranking of K answers has the weight 1 / (number of its pairs): so long rankings count no more than
    pairs. Sources: Ouyang et al. 2022, arXiv 2203.02155, section 3.5; the margin Touvron et al. 2023, arXiv 2307.09288,
    section 3.2.2; centering Eisenstein et al. 2023, arXiv 2312.09244.
    """
    losses = -F.logsigmoid(preferred - other - margins)
    if centering:
        losses = losses + centering * (preferred + other).square()
    return (weights * losses).sum()


def comparison_metrics(preferred: Tensor, other: Tensor, weights: Tensor) -> dict[str, float]:
    """Return how well rewards [n] of compared answers agree with the comparisons; all are means by `weights`.

    loss: -log sigmoid(d), where d is the reward of the preferred answer less that of the other.
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
