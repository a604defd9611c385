"""Simulated runs that learn, in which durations, learner and servers change: what `staleness.depth: auto` has to meet.

A run ends when it has learned as much as `target` synchronous steps teach. A batch teaches (1 + staleness)^-exponent of
a synchronous step, by its mean staleness. `score` is then the effective steps a minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from async_rl.config import StalenessConfig, slots_at
from async_rl.depth.controller import DepthController
from async_rl.messages.reports import GroupRecord
from buffer.simulate import GroupTime, Simulation, Workload
from tests.kit.configs import make_config

CEILING = 8
FRESH = 32
TARGET = 200.0
MOST_STEPS = 100_000
KL_PER_VERSION = 0.0085
TOKENS_PER_S = 100.0


@dataclass(frozen=True, kw_only=True)
class World:
    """How long groups and training take, and how that changes from the start of the run to its end."""

    name: str
    mean_s: float
    cv: float = 1.0
    pareto: bool = False
    """Episodes whose number of turns has a Pareto tail."""
    tool_share: float = 0.0
    """The share of groups that also wait `tool_s` for a tool."""
    tool_s: float = 0.0
    tools_grow: bool = False
    """The share of groups with tools grows from 0 to `tool_share`."""
    load: float = 0.0
    """With n groups at each server one takes 1 + load (n - 1) times as long."""
    concurrency: int = 128
    servers: int = 1
    servers_lost: bool = False
    """Half of the servers are lost half-way."""
    grow: float = 1.0
    """At the end, groups take so many times as long as at the start."""
    train_s: float = 10.0
    train_grows: float = 1.0
    sensitive: tuple[float, float] = (1.0, 1.0)
    """How strongly staleness costs at the start and at the end, in units of the law."""

    def __str__(self) -> str:
        return self.name

    def times(self, seed: int, number: int = 40_000) -> list[GroupTime]:
        """Return the time that each group takes at the start of the run, by the number of its prompt."""
        rng = np.random.default_rng(1000 + seed)
        if self.pareto:
            raw = np.minimum((1 - rng.random(number)) ** (-1 / 2.2) * 1.2 / 2.2, 12.0)
            work = self.mean_s * raw / raw.mean()
        else:
            sigma = math.sqrt(math.log1p(self.cv**2))
            work = self.mean_s * rng.lognormal(-(sigma**2) / 2, sigma, number)
        tool = np.where(rng.random(number) < self.tool_share, self.tool_s * rng.lognormal(-0.03, 0.25, number), 0.0)
        return [GroupTime(sampling_s, waiting_s) for sampling_s, waiting_s in zip(work, tool, strict=True)]


class _Done(Exception):
    """The run has learned what it was to learn."""


class LearningRun(Simulation):
    """One run in a world, with a controller, or at the depth at which it starts.

    Args:
        exponent: what a version of staleness costs, before `sensitive`.
        depth: at the start.
        ceiling: staleness.max.
        target: how many synchronous steps teach what the run is to learn.
    """

    def __init__(
        self, world: World, seed: int, exponent: float, depth: float, ceiling: int = CEILING, auto: bool = False,
        target: float = TARGET,
    ) -> None:
        workload = Workload(
            concurrency=world.concurrency, prompts_per_step=FRESH, train_s=world.train_s, sync_s=0.5, receive_s=0.05,
            group_mean_s=world.mean_s, load_s=world.load / world.servers * world.mean_s,
        )
        super().__init__(workload, StalenessConfig(max=ceiling, depth=depth), seed)
        self.world, self.exponent = world, exponent
        self.learned = 0.0
        self._target = target
        self.depths = [depth]
        self._servers = world.servers
        self._times = world.times(seed)
        self._began: list[tuple[float, float]] = []
        self._own: list[GroupTime] = []
        self._arrived: list[GroupRecord] = []
        self._noise = np.random.default_rng(77)
        self._train_noise = np.random.default_rng([seed, 5])
        self._last_s = self._last_train_s = 0.0
        self.controller = DepthController(_config(world, ceiling), depth, 0) if auto else None

    @property
    def share(self) -> float:
        return min(1.0, self.learned / self._target)

    @property
    def score(self) -> float:
        """Effective synchronous steps a minute."""
        return 60 * self.learned / self.now_s

    def learn(self) -> LearningRun:
        try:
            self.run(MOST_STEPS)
        except _Done:
            return self
        raise AssertionError("the run learned nothing")

    def group_time(self) -> GroupTime:
        world, number = self.world, len(self._own)
        time = self._times[number % len(self._times)]
        waits = not world.tools_grow or (number * 7919 % 1000) / 1000 <= self.share
        scale = 1 + (world.grow - 1) * self.share
        self._own.append(GroupTime(time.sampling_s * scale, time.waiting_s if waits else 0.0))
        self._began.append((self.now_s, self.group_seconds))
        return self._own[-1]

    def train_time_s(self) -> float:
        factor = self._train_noise.lognormal(-(0.05**2) / 2, 0.05) * (1 + (self.world.train_grows - 1) * self.share)
        self._last_train_s = self.world.train_s * float(factor)
        return self._last_train_s

    def on_finished(self, group_id: int) -> None:
        time, (start_s, group_seconds) = self._own[group_id], self._began[group_id]
        seconds = max(self.now_s - start_s, 1e-9)
        together = (self.group_seconds - group_seconds) / seconds / self._servers
        steps = max(1, round(time.sampling_s * TOKENS_PER_S))
        self._arrived.append(GroupRecord(max(0.0, seconds - time.waiting_s), time.waiting_s, steps, together))

    def slots_after(self, version: int, ages: Sequence[int]) -> int | None:
        start, end = self.world.sensitive
        sensitive = start + (end - start) * self.share
        staleness = sum(ages) / len(ages)
        self.learned += (1 + staleness) ** (-self.exponent * sensitive)
        if self.learned >= self._target:
            raise _Done
        if self.world.servers_lost and self.share >= 0.5 and self._servers == self.world.servers:
            self._lose_servers()
        depth = self._decide(version, staleness, sensitive) if self.controller else self.depths[-1]
        self.depths.append(depth)
        return slots_at(depth, FRESH)

    def _decide(self, version: int, staleness: float, sensitive: float) -> float:
        """Show the step to the controller, and return the depth that it wants. KL has 40 % of noise at each step."""
        assert self.controller
        kl = KL_PER_VERSION * sensitive**2 * staleness * math.exp(self._noise.normal(0, 0.4))
        step_s, receive_s = self.now_s + 0.5 - self._last_s, self.workload.receive_s
        waited_s = max(0.0, step_s - self._last_train_s - 0.5 - receive_s)
        values = {
            "time/step_s": step_s, "time/train_s": self._last_train_s, "time/push_s": 0.5, "push/pause_s": 0.5,
            "time/wait_data_s": waited_s + receive_s, "buffer/waited_s": waited_s, "staleness/mean": staleness,
            "alarm/kl": float(kl > 0.1), "offpolicy/kl_behaviour_proximal_k3": kl, "offpolicy/ess": 1 - 2 * kl,
        }
        self._last_s = self.now_s + 0.5
        self.controller.change_servers(self._servers)
        self.controller.add_groups(self._arrived)
        self._arrived.clear()
        self.controller.add_step(version, values, is_disturbed=False)
        if prospect := self.controller.prospect():
            self.controller.decide(self.controller.look(prospect))
        return self.controller.wanted

    def _lose_servers(self) -> None:
        """Half of the servers are gone; the prompts of their groups are granted again."""
        self._servers //= 2
        workload = self.workload
        self.workload = replace(workload, concurrency=workload.concurrency // 2, load_s=2 * workload.load_s)
        for heap in (self._ends, self._waits):
            heap[:] = [(end, group_id) for end, group_id in heap if group_id % 2 == 0]
            heap.sort()
        for group_id in [group_id for group_id in self.store.state.running if group_id % 2]:
            self.store.fail(group_id, "its server is lost", requeue=True)


def _config(world: World, ceiling: int):
    return make_config(
        staleness={"max": ceiling, "depth": "auto"}, learner={"prompts_per_step": FRESH},
        rollout={"concurrency": world.concurrency // world.servers},
        placement={"rollout": {"servers": world.servers}}, run={"steps": MOST_STEPS},
    )


WORLDS = (
    World(name="short, engine full", mean_s=0.28, cv=0.1, load=1.0, concurrency=32),
    World(name="short, engine has room", mean_s=8.0, cv=0.1),
    World(name="cv 1", mean_s=8.0),
    World(name="cv 1.5", mean_s=8.0, cv=1.5, concurrency=160),
    World(name="bimodal tools", mean_s=4.0, cv=0.3, tool_share=0.2, tool_s=40.0, concurrency=160),
    World(name="Pareto episodes, loaded", mean_s=6.0, pareto=True, load=0.02, concurrency=160),
    World(name="durations double", mean_s=6.0, grow=2.0, concurrency=160),
    World(name="durations x4", mean_s=4.0, grow=4.0, concurrency=160),
    World(name="server lost half-way", mean_s=4.0, load=0.03, servers=2, servers_lost=True),
    World(name="learner slower", mean_s=3.0),
    World(name="rollout slower, full", mean_s=0.6, load=1.0),
    World(name="rollout slower, room", mean_s=30.0, concurrency=256),
    World(name="double + sensitive late", mean_s=5.0, grow=2.0, sensitive=(0.3, 2.0), concurrency=160),
    World(name="x4 + sensitive late", mean_s=3.0, grow=4.0, sensitive=(0.3, 2.0), concurrency=192),
    World(name="shorter + sensitive late", mean_s=16.0, grow=0.25, sensitive=(0.3, 2.5), concurrency=192),
    World(
        name="switch: short, then tools", mean_s=4.0, cv=0.1, tool_share=0.25, tool_s=50.0, tools_grow=True,
        concurrency=160,
    ),
    World(name="switch: room, then loaded", mean_s=1.0, cv=0.6, grow=10.0, load=0.04, concurrency=160),
    World(name="switch: learner slows x3", mean_s=12.0, train_s=5.0, train_grows=4.0, concurrency=160),
    World(
        name="switch: short, tools, sensitive", mean_s=4.0, cv=0.1, tool_share=0.25, tool_s=50.0, tools_grow=True,
        sensitive=(2.0, 0.3), concurrency=160,
    ),
)
