"""Checks of weights for verified pushes: the sum of all values, and whether one is NaN.

vLLM's servers load this file by its path, so it imports nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

_CHUNK = 2**20


def value_sums(weights: Iterable[Tensor]) -> tuple[float, float]:
    """Return (sum of x, sum of |x|) over all values of the weights of floating-point types, in float64.

    They say nothing of names, order or shapes, so a server that has fused a learner's weights has the same sums, up to
    the rounding of float64.
    """
    parts = []
    for weight in weights:
        if weight.is_floating_point() and weight.numel():
            values = (part.double() for part in weight.detach().reshape(-1).split(_CHUNK))
            parts += [(float(x.sum()), float(x.abs().sum())) for x in values]
    return math.fsum(total for total, _ in parts), math.fsum(size for _, size in parts)


def holds_nan(weight: Tensor) -> bool:
    """Return whether a value of `weight` is NaN. The weight must have at least one value and a floating-point type."""
    if weight.element_size() == 1:  # torch has no maximum of these types; the mask takes as much memory as they do
        return bool(weight.isnan().any())
    return bool(weight.amax().isnan())
