"""A run whose gold is known at each KL."""

from __future__ import annotations

import numpy as np

from benchmarks.reward_curves import Curve

E = float(np.e)


def gao(a: float, b: float, kind: str = "no penalty", seed: int = 0, start: float = -1.0) -> Curve:
    """A run of 200 steps to a KL of 36, whose gold is d (a - b log d) above its start, and whose proxy rises."""
    kl = np.linspace(0.0, 36.0, 200)
    d = np.sqrt(np.maximum(kl, 1e-6))
    gold = d * (a - b * np.log(d)) + start
    gold[0] = start
    return Curve(kind, seed, kl, proxy=d, gold=gold)
