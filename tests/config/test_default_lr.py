from __future__ import annotations

import math

import pytest

from async_rl.config.learning import default_lr


@pytest.mark.parametrize(
    ("weights", "has_adapters", "rate"),
    [
        (7_000_000_000, False, 1e-6), (1_000_000_000, False, 1e-6), (7_000_000_000, True, 1e-5),
        # 1e-6 * 2 ** 0.7 = 1.62e-6; 7.43 ** 0.7 = 4.07; 3333 ** 0.7 = 292
        (500_000_000, False, 1.6e-6), (134_500_000, False, 4.1e-6), (300_000, False, 2.9e-4), (300_000, True, 2.9e-3),
    ],
)
def test_the_learning_rate_falls_with_the_weights_and_is_higher_for_adapters(
    weights: int, has_adapters: bool, rate: float
) -> None:
    assert math.isclose(default_lr(weights, has_adapters=has_adapters), rate, rel_tol=1e-9)
