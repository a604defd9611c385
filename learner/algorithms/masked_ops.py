"""Ratios and divergences of probabilities without overflow, and sums and means over the tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp, so that no ratio overflows sums in float32."""
PROBABILITY_MARGIN = 1e-6
"""Binary KL divergences clamp probabilities this far from 0 and 1, as prime-rl does."""


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
