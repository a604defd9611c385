"""Moves the depth of a run to where it learns most in a minute (staleness.depth: auto). No I/O, no thread, no clock.

After 8 steps, and then every 15, the next steps are simulated at several depths with the durations of the run's own
groups, and the depth moves if another is worth 1.5 % more (see choice.py); a smaller one has to be worth more also if
staleness costs half of what it is taken to cost. After a move nothing is decided until the steps show it: a smaller
depth takes as many steps as the old one had, because groups that exist are trained first. An alarm lowers the depth by
half a batch at once, down to 1, but not in the first 7 steps, nor before a move has settled. The push that follows
makes the move; after the last one that opens admission none is wanted. What the reward does is not looked at: it takes
90 to 800 steps at each depth to see a difference of 5 % there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from async_rl.config import Config, depth_at, slots_at
from async_rl.depth.choice import (
    Forecast,
    Prospect,
    best_move,
    compared,
    forecast,
    in_reach,
    near,
)
from async_rl.depth.window import RecentWindow
from async_rl.messages.reports import GroupRecord
from async_rl.telemetry.metrics import Metric

MEASURED_STEPS = 8
"""Steps before the first decision, and before the next after a change of servers."""
EVERY_STEPS = 15
IN_REACH_EVERY = 8
"""One in so many decisions looks at all depths that a move may reach, the first included; the others at near ones."""
ALARMS = {"ess": "the ESS is low", "kl": "the KL is high", "truncated": "many importance weights are truncated"}
"""[name in learner/alarms.py] the alarms that a smaller depth may end."""
ALARM_STEP = 0.5
ALARM_FLOOR = 1.0
"""An alarm goes no lower: below 1 the learner and the servers take turns, so that half a batch less costs up to half of
the steps, for half a version. Whether that pays is left to the decisions, which may go to 0."""
ALARM_HOLD_STEPS = 12
BELIEVED = (0.7, 1.4)
"""Measured over predicted speed. Beyond that the model is too wrong for far depths."""


@dataclass(frozen=True, slots=True)
class Move:
    """A depth to which the run is to move, with its number of slots, and why."""

    depth: float
    slots: int
    reason: str


class DepthController:
    """Decides on the depth of one run. The caller simulates `prospect` with `look` where that takes no one's time.

    Args:
        depth: the depth at the start, or of the checkpoint from which the run resumes.
        version: the policy version at the start.
    """

    def __init__(self, config: Config, depth: float, version: int) -> None:
        self._config = config
        self._fresh = config.fresh_per_step
        limits = config.slot_limits
        self._lowest = depth_at(limits.at(limits.smallest_depth), self._fresh)
        self.depth = self.wanted = max(depth, self._lowest)
        """The depth that the run has, and the one that it will have with the move that is on its way, if one is."""
        self._window = RecentWindow(config)
        self._version = version
        self._hold_until = self._next_at = version + MEASURED_STEPS
        self._moved_at = version
        self._decisions = 0
        self._moves = 0
        self._servers = config.placement.rollout.servers
        self._have_servers_changed = False
        """Whether they have since the last `prospect`, whose forecasts are then of other servers."""
        self._ratios: deque[float] = deque(maxlen=5)
        """Measured over predicted speed at the last decisions."""
        self._here: Forecast | None = None
        """The forecast for the present depth, of the last decision."""

    def add_groups(self, groups: Iterable[GroupRecord]) -> None:
        self._window.add_groups(groups)

    def add_step(self, version: int, values: Mapping[str, float], *, is_disturbed: bool) -> Move | None:
        """Add the metrics of a step, and return the move that an alarm demands, if any.

        Args:
            is_disturbed: something else than training took time in the step, such as an evaluation or a restart.
        """
        self._version = version
        if not is_disturbed:
            self._window.add_step(version, values)
        broken = [text for name, text in ALARMS.items() if values.get(f"alarm/{name}")]
        old, floor = self.wanted, max(self._lowest, ALARM_FLOOR)
        if not broken or version < self._hold_until or old <= floor or not self._may_move:
            return None
        lower = max(floor, old - ALARM_STEP)
        while lower > floor and slots_at(lower, self._fresh) == slots_at(old, self._fresh):  # with batches of one group
            lower = max(floor, lower - ALARM_STEP)
        lower = depth_at(slots_at(lower, self._fresh), self._fresh)
        less = "half a batch less" if lower >= old - ALARM_STEP else "less"
        move = self._move(lower, f"{less} than {old:g}, because {broken[0]}")
        self._hold_until = version + math.ceil(old) + ALARM_HOLD_STEPS
        return move

    def moved(self, slots: int) -> None:
        """Take that a move has been made: the buffer has so many slots."""
        self.depth = depth_at(slots, self._fresh)
        self._moves += 1

    def change_servers(self, servers: int) -> None:
        """Take the number of rollout servers that are up; a change is a reason to look at all depths again."""
        if servers == self._servers or servers == 0:
            return
        self._servers, self._decisions, self._have_servers_changed = servers, 0, True
        self._moved_at = max(self._moved_at, self._version)
        self._window.forget_groups()
        self._next_at = self._version + MEASURED_STEPS

    @property
    def version(self) -> int:
        """The policy version that the newest step made."""
        return self._version

    @property
    def has_measured(self) -> bool:
        """Whether there are enough groups and steps for a decision."""
        return self._window.is_filled

    def prospect(self) -> Prospect | None:
        """Return what a decision needs to know if one is due, else None."""
        is_due = self._version >= max(self._hold_until, self._next_at) and self._may_move
        if not is_due or not self._window.is_filled:
            return None
        self._have_servers_changed = False
        return self._prospect()

    def _prospect(self) -> Prospect:
        loss = self._window.ess_loss_per_version if self._config.learner.lr_by_ess != "off" else None
        return Prospect(
            self._window.workload(self._servers), self._config.staleness.max, self.wanted, self._lowest,
            self._window.kl_per_version, loss,
        )

    def look(self, prospect: Prospect) -> dict[float, Forecast]:
        """Simulate the depths between which the next decision chooses. It reads nothing that other calls change."""
        ratio = self.measured_over_predicted
        is_believed = ratio is None or BELIEVED[0] <= ratio <= BELIEVED[1]
        return in_reach(prospect) if is_believed and self._decisions % IN_REACH_EVERY == 0 else near(prospect)

    def decide(self, forecasts: dict[float, Forecast]) -> Move | None:
        """Return the move to the best depth of `look`, or None if it is not worth a move."""
        if self._have_servers_changed:
            return None
        self._next_at = self._version + EVERY_STEPS
        self._decisions += 1
        here = forecasts.get(self.wanted)
        if here is None or self._version < self._hold_until:  # an alarm has moved the depth meanwhile
            return None
        self._here = here
        if step_s := self._window.step_s(self._moved_at):
            self._ratios.append(60 / step_s / here.steps_per_min)
        best = best_move(forecasts, here) if self._may_move else None
        if best is None:
            return None
        self._here = best
        larger = next((other for depth, other in forecasts.items() if depth > best.depth), None)
        more = f"; {larger.depth:g} gives {compared(larger, best)}" if larger else ""
        return self._move(best.depth, compared(best, here) + more)

    def _move(self, depth: float, reason: str) -> Move:
        settled = self._version + math.ceil(self.wanted) + 1 + self._config.weight_sync.every_steps
        self.wanted, self._hold_until, self._moved_at = depth, settled, settled
        return Move(depth, slots_at(depth, self._fresh), reason)

    @property
    def _may_move(self) -> bool:
        """Whether a push is to come that opens admission, as those do before the last step."""
        every = self._config.weight_sync.every_steps
        return (self._version // every + 1) * every < self._config.run.steps

    @property
    def measured_over_predicted(self) -> float | None:
        """The median of the last decisions; None before the first."""
        return float(np.median(self._ratios)) if self._ratios else None

    def metrics(self) -> list[Metric]:
        """Return the depth, the number of moves made, and what the last decision expects."""
        values = {"staleness/depth": self.depth, "auto/moves": float(self._moves)}
        if here := self._here:
            values |= {
                "auto/predicted_steps_per_min": here.steps_per_min, "auto/efficiency": here.efficiency,
                "auto/kl_per_version": self._window.kl_per_version,
            }
        if ratio := self.measured_over_predicted:
            values["auto/measured_over_predicted"] = ratio
        return [Metric(key, value, "last") for key, value in values.items()]

    def last_prospect(self) -> Prospect | None:
        """Return what `outlook` needs to know; None if too little was measured."""
        return self._prospect() if self._window.is_filled else None

    def outlook(self, prospect: Prospect) -> str:
        """Return in words what twice the ceiling would have given. It simulates."""
        ceiling = prospect.ceiling
        here, higher = forecast(prospect, self.depth), forecast(prospect, self.depth, 2 * ceiling)
        gain = higher.steps_per_min / here.steps_per_min - 1
        limited = ", which limits the depth," * (self.depth == ceiling)
        return (
            f"depth {self.depth:g} at the end, after {self._moves} move(s). Simulated with the last groups, "
            f"staleness.max {2 * ceiling} in place of {ceiling}{limited} would give {max(0.0, 100 * gain):.0f} % more "
            "steps at this depth"
        )
