"""An advantage from outside the packages: which share of its group a row beats."""

from __future__ import annotations

from torch import Tensor

from async_rl.base.seams import Advantage


def win_rate(rewards: Tensor) -> Tensor:
    """A_i = share of the group's rewards below x_i less the share above. [G] -> [G], G >= 2."""
    return (rewards[:, None] - rewards).sign().mean(1)


WIN_RATE = Advantage(of_group=win_rate, compares_group=True)
