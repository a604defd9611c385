"""The groups and steps that a run measured lately, as the simulator's workload for the next steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.messages.reports import GroupRecord
from buffer.simulate import GroupTime, Workload

WINDOW_BATCHES = 8
"""The groups of so many batches are those whose durations the next ones will have."""
LOAD_BATCHES = 32
"""The groups of so many batches tell how much a group is slowed down by others, which changes less."""
WINDOW_STEPS = 20
KL_PER_VERSION = 0.0085
"""KL of behaviour to proximal policy, k3 in nats a token, that one version of staleness gave in this project's sweeps
(docs/results.md, exact staleness 1). Used until the run has measured its own since its start or resume."""
_LOWEST_STALENESS = 0.2
"""Steps with no more staleness say little of what a version of it costs."""
Array = npt.NDArray[np.float64]
_DROPPED = ("buffer/dropped_failed", "buffer/dropped_zero_variance")
ABORTED_TAKE = 2.0
"""A group that was aborted would have taken so many times as long: the mean of what has lasted so long, if the tail of
the durations is a Pareto law of index 2."""


@dataclass(frozen=True, slots=True)
class _Step:
    version: int
    step_s: float
    values: Mapping[str, float]


class RecentWindow:
    """Keeps the last LOAD_BATCHES batches' worth of groups and the last WINDOW_STEPS steps of one run.

    The last WINDOW_STEPS that tell what staleness costs are kept apart: at depth 0 none is added to them, and a run
    that forgot why it went there would leave and come back again and again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: deque[GroupRecord] = deque(maxlen=LOAD_BATCHES * config.fresh_per_step)
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._stale_steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)

    def add_groups(self, groups: Iterable[GroupRecord]) -> None:
        self._groups.extend(groups)

    def forget_groups(self) -> None:
        """Forget the groups measured so far, because from now on others take other times."""
        self._groups.clear()

    def add_step(self, version: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step in which nothing but training happened."""
        step = _Step(version, values["time/step_s"], values)
        self._steps.append(step)
        if values.get("staleness/mean", 0.0) > _LOWEST_STALENESS:
            self._stale_steps.append(step)

    @property
    def is_filled(self) -> bool:
        """Whether there are two steps, and as many groups that were not aborted as a batch has."""
        finished = sum(not group.is_aborted for group in self._groups)
        return len(self._steps) > 1 and finished >= self._config.fresh_per_step

    def step_s(self, since: int) -> float | None:
        """Return the mean duration of the steps after version `since`; None if there are fewer than four."""
        found = [step.step_s for step in self._steps if step.version > since]
        return float(np.mean(found)) if len(found) >= 4 else None

    @property
    def kl_per_version(self) -> float:
        """The median over the last stale steps of the KL of behaviour to proximal policy over the mean staleness."""
        return self._per_version("offpolicy/kl_behaviour_proximal_k3", KL_PER_VERSION)

    @property
    def ess_loss_per_version(self) -> float:
        """The median over the last stale steps of 1 - ESS / N over the mean staleness; in our sweeps twice the KL.

        The ESS is that of the step size, sqrt(ESS / N): of tokens or of rows, as learner.lr_by_ess says.
        """
        return self._per_version("policy/lr_scale", 2 * KL_PER_VERSION, lambda scale: 1 - scale**2)

    def _per_version(self, key: str, prior: float, cost: Callable[[float], float] = float) -> float:
        found = [
            max(0.0, cost(step.values[key])) / step.values["staleness/mean"]
            for step in self._stale_steps if key in step.values
        ]
        return float(np.median(found)) if found else prior

    def workload(self, servers: int) -> Workload:
        """Return the workload of the next steps: the run's rules with the durations of the window.

        Args:
            servers: the number of rollout servers that are up.
        """
        rules = rules_of(self._config, servers)
        train, push = self._of_steps("time/train_s"), self._of_steps("time/push_s")
        pause_s = float(np.mean(self._of_steps("push/pause_s") or [0.0]))
        step_s = float(np.mean([step.step_s for step in self._steps]))
        load, groups = without_load(list(self._groups), servers, pause_s / rules.every_steps / step_s)
        groups = groups[-WINDOW_BATCHES * self._config.fresh_per_step :]
        mean_s = float(np.mean([group.sampling_s for group in groups]))
        return dataclasses.replace(
            rules, train_s=float(np.mean(train)), train_cv=float(np.std(train) / np.mean(train)),
            sync_s=float(np.mean(push or [0.0])), pause_s=pause_s, failed=self._failed(),
            receive_s=receive_s([step.values for step in self._steps]),
            groups=groups, group_mean_s=mean_s, load_s=load * mean_s,
        )

    def _of_steps(self, key: str) -> list[float]:
        return [step.values[key] for step in self._steps if key in step.values]

    def _failed(self) -> float:
        """Return the share of groups that arrived or failed and were dropped, over the steps of the window.

        Steps between them are left out: when a server is lost, its groups fail.
        """
        dropped = trained = 0.0
        for before, after in itertools.pairwise(self._steps):
            if after.version == before.version + 1:
                dropped += sum(after.values.get(key, 0.0) - before.values.get(key, 0.0) for key in _DROPPED)
                trained += after.values.get("buffer/trained", 0.0) - before.values.get("buffer/trained", 0.0)
        return dropped / (dropped + trained) if dropped > 0 else 0.0


def receive_s(steps: Iterable[Mapping[str, float | None]]) -> float:
    """Return how long the learner takes to receive a batch that is ready, given the metrics of steps.

    That is the median of its waits, without the time in which the buffer had no batch; 0 if nothing was measured.
    """
    pairs = [(step.get("time/wait_data_s"), step.get("buffer/waited_s")) for step in steps]
    found = [max(0.0, waits - without) for waits, without in pairs if waits is not None and without is not None]
    return float(np.median(found)) if found else 0.0


def rules_of(config: Config, servers: int) -> Workload:
    """Return a workload with the sizes and rules of a run; its durations are the simulator's defaults."""
    return Workload(
        concurrency=config.rollout.concurrency * servers, prompts_per_step=config.learner.prompts_per_step,
        late=config.staleness.late, max_uses=config.buffer.max_uses, fresh_fraction=config.buffer.fresh_fraction,
        every_steps=config.weight_sync.every_steps, drain=config.weight_sync.on_update == "drain",
    )


def without_load(groups: Sequence[GroupRecord], servers: int, paused: float) -> tuple[float, list[GroupTime]]:
    """Return (load, the times that measured groups would have taken alone, without pushes).

    With n groups at the engines a group takes 1 + load (n - 1) times as long as alone. Sampling a token is taken to
    cost a + b n seconds: a straight line through the groups of the window, which met more or fewer others. Where these
    numbers differ too little to tell, half of the cost is taken to be b n, with an error of half of it.

    Args:
        groups: at least one that was not aborted. Aborted ones tell nothing of the load; their time is split between
            the engine and elsewhere as that of the others, and they take ABORTED_TAKE times as long.
        servers: the number of servers over which groups are spread evenly.
        paused: the share of time in which pushes pause the engines.
    """
    is_aborted = np.array([group.is_aborted for group in groups])
    sampling_s = np.array([group.sampling_s for group in groups]) * (1 - paused)
    waiting_s = np.array([group.waiting_s for group in groups])
    steps = np.where(is_aborted, 0.0, [float(group.steps) for group in groups])
    total_s = sampling_s + waiting_s
    at_engine = float(sampling_s[~is_aborted].sum() / total_s[~is_aborted].sum())
    sampling_s = np.where(is_aborted, ABORTED_TAKE * total_s * at_engine, sampling_s)
    waiting_s = np.where(is_aborted, ABORTED_TAKE * total_s * (1 - at_engine), waiting_s)
    others = np.maximum(1.0, np.array([group.together for group in groups]) * servers * at_engine)
    mean = float(np.average(others, weights=steps))
    token_s = sampling_s[~is_aborted] / steps[~is_aborted]
    share = _share_of_load(token_s, steps[~is_aborted], others[~is_aborted] / mean)
    load = share / (mean * (1 - share) + share)
    alone_s = sampling_s / (1 + load * (others - 1))
    return load, [GroupTime(max(s, 1e-6), w) for s, w in zip(alone_s.tolist(), waiting_s.tolist(), strict=True)]


def _share_of_load(token_s: Array, steps: Array, others: Array) -> float:
    """Return which share of the time of sampling comes from other groups at the engine, 0 to 1, at `others` = 1.

    The estimate of least squares, in which a group counts by its tokens, and the guess of 0.5 +- 0.5 count by the
    inverse of their squared errors.
    """
    guess, guess_error = 0.5, 0.5
    mean_s, mean_others = np.average(token_s, weights=steps), np.average(others, weights=steps)
    beside_mean = others - mean_others
    square = float((steps * beside_mean**2).sum())
    if square < 1e-6 * steps.sum():
        return guess
    more = float((steps * beside_mean * (token_s - mean_s)).sum()) / square
    total = float(mean_s + more * (1 - mean_others))
    if total <= 0:
        return guess
    residuals = token_s - mean_s - more * beside_mean
    spread = float((steps * residuals**2).sum()) / max(1, len(steps) - 2)
    error = math.sqrt(spread / square) / total
    weight = guess_error**2 / (guess_error**2 + error**2)
    return float(np.clip(guess + weight * (more / total - guess), 0.0, 1.0))
