"""A correction from outside the packages: the square root of the importance ratio."""

from __future__ import annotations

from torch import Tensor

from async_rl.base.seams import Correction


def root_weights(log_rho: Tensor, advantages: Tensor, trained: Tensor, rows: Tensor, count: int) -> Tensor:
    """sqrt(rho) of each token. [N]"""
    return (0.5 * log_rho).exp()


ROOT = Correction(function=root_weights)
