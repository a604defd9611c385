"""The standard errors of a run's parity: sound runs of many kinds raise few alarms, and errors of the engine do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from async_rl.base.telemetry.certificate import ParityAxis, certificate, standard_error
from async_rl.base.telemetry.metrics import Figures
from learner.algorithms.diagnostics import MetricAccumulator
from learner.algorithms.parity import add_parity, parity_metrics
from tests.kit.learner.batches import make_response

pytestmark = pytest.mark.processes  # together they compute for seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Steps of prompts with several answers each. The logits of each context are drawn anew, or with `twins` once for
    all answers to a prompt. The learner's logits differ from the engine's by noise."""

    steps: int = 4
    prompts: int = 12
    answers: int = 8
    length: float = 10.0  # of an answer, in the mean
    spread: float = 0.0  # of the logarithm of lengths, and of the numbers of prompts of the steps
    twins: bool = False
    logits: float = 2.0  # their standard deviation
    surely: float = 0.0  # added to the logit of one token
    noise: float = 0.01
    tails: float = math.inf  # degrees of freedom of the noise's t distribution
    of_rows: float = 0.0  # the share of the noise's variance that a row has in common
    engine: Literal["sound", "colder", "cut"] = "sound"
    by: float = 0.0  # colder by this share; cut: the probability of the unlikely tokens that are not sampled

    def step(self, rng: np.random.Generator) -> tuple[list[int], Floats, Floats, Floats]:
        """The rows' lengths, and the tokens' d, logprobs of the engine, and entropies of the learner."""
        prompts = max(1, round(self.prompts * math.exp(self.spread * rng.normal())))
        drawn = self.length * np.exp(self.spread * rng.normal(size=prompts * self.answers))
        lengths = np.maximum(1, np.where(self.spread, drawn, self.length)).astype(int)
        row = np.arange(len(lengths)).repeat(lengths)
        place = np.concatenate([np.arange(length) for length in lengths])
        _, context = np.unique(row // self.answers * 10_000 + place if self.twins else np.arange(len(row)),
                               return_inverse=True)
        shape = (context.max() + 1, 24)
        z = self.logits * rng.normal(size=shape)
        z[:, 0] += self.surely
        noise = math.sqrt(1 - self.of_rows) * rng.normal(size=shape)
        if self.of_rows:
            noise += math.sqrt(self.of_rows) * rng.normal(size=(len(lengths), 24))[row]
        if self.tails < math.inf:
            noise /= np.sqrt(rng.chisquare(self.tails, (len(noise), 1)) / self.tails)
        log_q = log_softmax(z / (1 - self.by) if self.engine == "colder" else z)
        log_p = log_softmax(z + self.noise * noise)
        q = np.exp(log_q)
        if self.engine == "cut":
            order = q.argsort(-1)
            q = np.where(np.take_along_axis(q, order, -1).cumsum(-1) > self.by, np.take_along_axis(q, order, -1), 0)
            q = np.take_along_axis(q, order.argsort(-1), -1)
        cumulated = q.cumsum(-1)
        token = (rng.random((len(row), 1)) * cumulated[context, -1:] > cumulated[context]).sum(-1)
        entropy = -(np.exp(log_p) * log_p).sum(-1)
        return list(lengths), (log_p - log_q)[context, token], log_q[context, token], entropy[context]


def log_softmax(z: Floats) -> Floats:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def figures_of(steps: list[tuple[list[int], Floats, Floats, Floats]], dtype: torch.dtype) -> dict[str, float]:
    declared = {}
    figures = Figures(declared)
    for lengths, *columns in steps:
        d, behaviour, entropy = map(torch.from_numpy, columns)
        sums = MetricAccumulator()
        add_parity(sums, make_response(lengths, behaviour=behaviour, comparable=torch.ones(len(d)).bool()), d, entropy)
        metrics = parity_metrics(sums.reduce(), dtype)
        declared |= {metric.key: metric.declaration for metric in metrics}
        figures.add({metric.key: metric.value for metric in metrics})
    return figures.all() | {"staleness/max": 0.0}


def precisions(world: World, runs: int) -> list[ParityAxis]:
    """The findings on precision of runs that differ only by their seed."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if world.noise > 1e-5 else torch.float32
        found.append(certificate(figures_of([world.step(rng) for _ in range(world.steps)], dtype))[1])
    assert {axis.name for axis in found} == {"precision"}
    return found


def test_the_errors_of_a_run_are_those_of_all_its_tokens_whatever_the_sizes_of_steps(one_rank: None) -> None:
    rng = np.random.default_rng(0)
    steps = [World(prompts=prompts, noise=0.1).step(rng) for prompts in (1, 30, 4)]
    figures = figures_of(steps, torch.bfloat16)
    sizes = np.array([len(d) for _, d, _, _ in steps])
    d, log_q, entropy = (np.concatenate(column) for column in zip(*(of[1:] for of in steps), strict=True))
    s = np.exp(d) * (log_q + d + entropy)
    assert figures["parity/precision/surprise"] == pytest.approx(s.mean())
    assert standard_error(figures, "surprise") == pytest.approx(math.sqrt((s * s).sum()) / len(s))
    slopes, squares = [], []
    for lengths, d, log_q, entropy in steps:
        x = log_q + entropy
        slopes.append(np.linalg.lstsq(x[:, None], d, rcond=None)[0][0])
        of_rows = np.array([part.sum() for part in np.split(x * d, np.cumsum(lengths)[:-1])])
        squares.append((of_rows**2).sum() / (x**2).sum() ** 2)  # the squared error of the step's slope
    assert figures["parity/precision/slope"] == pytest.approx((sizes * slopes).sum() / sizes.sum())
    error = math.sqrt((sizes**2 * squares).sum()) / sizes.sum()
    assert standard_error(figures, "slope") == pytest.approx(error)


@pytest.mark.parametrize(("world", "runs"), [
    (World(), 100), (World(noise=4e-7), 100), (World(steps=2, prompts=2, answers=2, noise=0.02), 400),
    (World(steps=60, prompts=1, answers=4, spread=0.8), 40), (World(length=1, answers=16, twins=True, noise=0.02), 100),
    (World(logits=20), 200), (World(logits=8, noise=0.01, tails=2.5, spread=1), 100),
    (World(logits=0.5, surely=11), 200), (World(logits=0.5, surely=11, steps=20), 60),
    (World(prompts=4, answers=4, length=60, noise=0.02, of_rows=0.8), 60),
], ids=["plain", "float32", "tiny", "uneven steps", "twins", "low entropy", "heavy tails", "sure", "surer", "rows"])
def test_a_sound_run_of_any_kind_raises_an_alarm_in_at_most_one_of_a_hundred(
    world: World, runs: int, one_rank: None
) -> None:
    alarms = [axis.finding for axis in precisions(world, runs) if axis.state == "broken"]
    assert len(alarms) <= runs / 100, alarms


@pytest.mark.parametrize(("world", "named"), [
    (World(engine="colder", by=0.01), "temperature"), (World(engine="colder", by=0.01, noise=4e-7), "temperature"),
    (World(engine="colder", by=0.01, steps=3, prompts=8, logits=4), "temperature"),
    (World(engine="cut", by=0.1), "support"), (World(engine="cut", by=0.05, logits=5), "support"),
    (World(engine="cut", by=0.02, steps=60, prompts=4), "support"),
], ids=["bfloat16", "float32", "small", "top_p", "low entropy", "less in a long run"])
def test_an_error_of_the_engine_is_found_and_named(world: World, named: str, one_rank: None) -> None:
    found = precisions(world, 20)
    assert all(axis.state == "broken" and axis.finding.startswith(named) for axis in found), found
