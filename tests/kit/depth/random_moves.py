"""Makes the depth of a run move again and again, as with staleness.depth auto."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from async_rl.config import slots_at
from async_rl.depth.controller import DepthController, Move
from async_rl.driver.depth_tuner import DepthTuner

DEPTHS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3)


def move_at_random(
    patch: Callable[[Any, str, Any], None], sent: Callable[[DepthTuner, int], None] | None = None
) -> None:
    """Have the controller want another depth after each step but some.

    Args:
        patch: replaces a method.
        sent: called with each step's version, when its move, if any, was sent.
    """
    rng, send = random.Random(0), DepthTuner._send
    steps: list[int] = []

    def want(self: DepthController, version: int, values: Any, *, is_disturbed: bool) -> Move | None:
        steps.append(version)
        depth = rng.choice([depth for depth in DEPTHS if self._lowest <= depth <= self._config.staleness.max])
        return Move(depth, slots_at(depth, self._fresh), f"{depth:g} was drawn") if version % 3 else None

    def send_and(self: DepthTuner, move: Move | None) -> None:
        send(self, move)
        if sent:
            sent(self, steps[-1])

    patch(DepthController, "add_step", want)
    patch(DepthTuner, "_send", send_and)
