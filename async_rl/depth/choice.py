"""Chooses the depth at which a run learns most in a minute, by simulating the next steps at several depths.

The worth of a depth is its speed times what a step teaches. Speed and mean staleness come from the simulator with the
durations of the run's own groups. What a step teaches, compared with a step on data that the newest policy sampled, is
1 / (1 + 2.41 sqrt(KL)), where KL is that of behaviour to proximal policy in nats a token (k3 estimator): a law fitted
to 90 runs at exact staleness (docs/depth.md). Its constant is known to a factor of two, so that a move which gives
up steps has to pay also with half of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_rl.config import depth_at, slots_at
from buffer.simulate import Workload, simulate

EFFICIENCY_PER_ROOT_KL = 2.41
STEPS, BEGIN = 80, 10
"""A forecast simulates so many steps and leaves out the first ones, in which the buffer fills: more at large depths."""
MOST_GROUPS = 5000
"""A forecast simulates fewer steps if these had more groups, but at least FEWEST_STEPS."""
FEWEST_STEPS = 30
WORTH_A_MOVE = 1.015
"""A move needs a depth that is worth so many times the present one. With 1.005 there are twice as many, for 0.3 %."""
MOST_UP = 1.0
"""A move goes up by no more than this: the groups that a window misses, as they still run, are the long ones."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """The state of a run when its depth is to be chosen."""

    workload: Workload
    ceiling: int
    """staleness.max."""
    depth: float
    """The depth that the run has now."""
    lowest: float
    kl_per_version: float
    ess_loss_per_version: float | None
    """By how much a version of staleness lowers ESS / N; None unless the step size follows it (learner.lr_by_ess)."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A depth with what it would give."""

    depth: float
    steps_per_min: float
    staleness: float
    """The mean staleness of the groups trained on."""
    efficiency: float
    """The worth of a step, in steps on data of the newest policy."""

    @property
    def worth(self) -> float:
        """Steps on data of the newest policy that would teach as much as a minute."""
        return self.steps_per_min * self.efficiency

    @property
    def worth_at_half_cost(self) -> float:
        """`worth` if staleness cost half as much. A step then teaches 1 / (1 + cost / 2); now 1 / (1 + cost)."""
        return self.steps_per_min / (1 + (1 / self.efficiency - 1) / 2)


def efficiency(kl: float) -> float:
    """Return what a step teaches whose KL of behaviour to proximal policy is `kl`, in steps without staleness."""
    return 1 / (1 + EFFICIENCY_PER_ROOT_KL * math.sqrt(max(0.0, kl)))


def forecast(prospect: Prospect, depth: float, ceiling: int | None = None) -> Forecast:
    """Simulate the next steps at a depth, below another ceiling than staleness.max if one is given."""
    workload = prospect.workload
    arriving = workload.prompts_per_step / (1 - workload.failed)
    begin = max(BEGIN, math.ceil(depth) + 2)
    steps = max(FEWEST_STEPS, min(STEPS, int(MOST_GROUPS / arriving))) + begin - BEGIN
    result = simulate(workload, prospect.ceiling if ceiling is None else ceiling, steps, depth=depth, begin=begin)
    worth = efficiency(prospect.kl_per_version * result.mean_staleness)
    if prospect.ess_loss_per_version is not None:
        worth *= math.sqrt(max(0.1, 1 - prospect.ess_loss_per_version * result.mean_staleness))
    return Forecast(depth, 60 / result.step_s, result.mean_staleness, worth)


def all_depths(lowest: float, ceiling: int, fresh_per_step: int) -> list[float]:
    """Return the depths that are tried: in quarters up to 3, in halves up to 5, whole ones up to the ceiling.

    Where batches have few groups, depths that need equally many slots are one.
    """
    quarters = (number / 4 for number in range(4 * ceiling + 1))
    sizes = ((depth, 0.25 if depth <= 3 else 0.5 if depth <= 5 else 1) for depth in quarters)
    named = (depth for depth, size in sizes if depth >= lowest and (depth % size == 0 or depth == ceiling))
    return [depth for depth in named if depth == depth_at(slots_at(depth, fresh_per_step), fresh_per_step)]


def near(prospect: Prospect) -> dict[float, Forecast]:
    """Forecast the present depth and the two next ones on either side."""
    depths = all_depths(prospect.lowest, prospect.ceiling, prospect.workload.fresh_per_step)
    at = min(range(len(depths)), key=lambda i: abs(depths[i] - prospect.depth))
    chosen = {*depths[max(0, at - 2) : at + 3], prospect.depth}
    return {depth: forecast(prospect, depth) for depth in sorted(chosen)}


def in_reach(prospect: Prospect) -> dict[float, Forecast]:
    """Forecast the present depth and, of those that one move may reach, every third and those around the best."""
    most = prospect.depth + MOST_UP
    every = all_depths(prospect.lowest, prospect.ceiling, prospect.workload.fresh_per_step)
    depths = [depth for depth in every if depth <= most]
    found = {depth: forecast(prospect, depth) for depth in depths[::3]}
    at = depths.index(best_of(found).depth)
    missing = {*depths[max(0, at - 2) : at + 3], prospect.depth} - found.keys()
    return dict(sorted((found | {depth: forecast(prospect, depth) for depth in missing}).items()))


def best_of(forecasts: dict[float, Forecast]) -> Forecast:
    return max(forecasts.values(), key=lambda forecast: forecast.worth)


def best_move(forecasts: dict[float, Forecast], here: Forecast) -> Forecast | None:
    """Return the best of the depths to which a move from `here` pays; None if it pays to none.

    A smaller depth has to be worth more also if staleness costs half as much as the law says: the steps that it gives
    up are certain, what the others teach more is not.
    """
    paying = {
        depth: new
        for depth, new in forecasts.items()
        if depth <= here.depth + MOST_UP and new.worth > WORTH_A_MOVE * here.worth
        if depth > here.depth or new.worth_at_half_cost > here.worth_at_half_cost
    }
    return best_of(paying) if paying else None


def compared(new: Forecast, old: Forecast) -> str:
    """Return in words what `new` gives over `old`, such as `6 % more steps than 1.25, and each teaches 2 % less`."""
    speed, teaching = new.steps_per_min / old.steps_per_min - 1, new.efficiency / old.efficiency - 1
    steps, worth = _percent(speed, "more", "fewer"), _percent(teaching, "more", "less")
    return f"{steps} steps than {old.depth:g}, and each teaches about {worth}"


def _percent(change: float, more: str, less: str) -> str:
    return f"{abs(100 * change):.0f} % {more if change >= 0 else less}"
