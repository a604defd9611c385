"""Computes ratios of probabilities without overflow, and sums and means over the tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are held in +-20 before exp, so that no ratio overflows sums in float32."""


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp(x) with x held in +-MAX_LOG_RATIO. Any shape."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the sum over the tokens of each of `count` rows. Values [N], index of the row [N] -> [count]."""
    return values.new_zeros(count).index_add(0, rows, values)


def mean_by_row(values: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the mean over the trained tokens of each row, 0 where it has none. [N], [N] bool, [N] -> [count]."""
    tokens = sum_by_row(trained.to(values.dtype), rows, count).clamp(min=1)
    return sum_by_row(torch.where(trained, values, 0.0), rows, count) / tokens
