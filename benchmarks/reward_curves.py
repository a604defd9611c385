"""Curves of a reward that is optimised (proxy) and of the true one (gold) against the KL: their form, tables and plots.

The form is that of Gao et al. 2022, arXiv 2210.10760, for RL: gold - gold at the start = d (a - b log d), d = sqrt(KL).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.sweeps.tables import Table

BIN = 0.25
"""The width in d of the bins over which the mean of all seeds is drawn."""
COLORS = ("#D55E00", "#009E73", "#CC79A7", "#56B4E9")


@dataclass(frozen=True, slots=True)
class Curve:
    """A training: KL of an answer in nats, proxy and gold after each step, smoothed."""

    kind: str
    seed: int
    kl: np.ndarray
    proxy: np.ndarray
    gold: np.ndarray
    rollbacks: tuple[tuple[int, int], ...] = ()
    """(version at which the guard found trouble, version to which it went back), in order."""
    ends_at: int = 0
    """The version with which the guard ended the run; 0: it did not."""
    first_gold: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Gold after each step until the first rollback, with the steps that it has discarded; empty without one."""
    troubles: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """The guard's first trouble `with gold labels` and `without`: its version, that to go back to, and the signals."""

    @property
    def peak(self) -> int:
        return int(self.gold.argmax())

    @property
    def gain(self) -> float:
        """How much higher gold is at its peak than at the start."""
        return float(self.gold[self.peak] - self.gold[0])

    @property
    def kept(self) -> float:
        """The share of the gain that is left at the end; negative if gold ends below its start."""
        return float(self.gold[-1] - self.gold[0]) / self.gain if self.gain > 0 else math.nan


def fit(curves: Sequence[Curve]) -> tuple[float, float, float]:
    """Return (a, b, R^2) of the RL form of Gao et al., gold - gold at the start = d (a - b log d), d = sqrt(KL).

    It is fitted to the points of all curves together.
    """
    d = np.sqrt(np.maximum(np.concatenate([each.kl for each in curves]), 1e-6))
    gain = np.concatenate([each.gold - each.gold[0] for each in curves])
    basis = np.stack([d, -d * np.log(d)], 1)
    (a, b), *_ = np.linalg.lstsq(basis, gain, rcond=None)
    residual = gain - basis @ np.array([a, b])
    return float(a), float(b), 1 - float(residual @ residual) / float(((gain - gain.mean()) ** 2).sum())


def by_kind(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves of each kind, in the order of their first ones."""
    return {kind: [each for each in curves if each.kind == kind] for kind in dict.fromkeys(c.kind for c in curves)}


def mean_text(values: Sequence[float]) -> str:
    """Return the mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.2f} ± {error:.2f}"


def mean_table(curves: Sequence[Curve]) -> Table:
    """Return the means over the seeds of each kind of training, with their standard errors."""
    header = ("training", "seeds", "gold at the start", "at its peak", "at the end", "proxy at the start", "at the end",
              "KL at the peak of gold", "at the end", "a", "b", "R^2")  # fmt: skip
    rows = []
    for kind, same in by_kind(curves).items():
        columns = [[c.gold[0] for c in same], [c.gold[c.peak] for c in same], [c.gold[-1] for c in same],
                   [c.proxy[0] for c in same], [c.proxy[-1] for c in same], [c.kl[c.peak] for c in same],
                   [c.kl[-1] for c in same]]  # fmt: skip
        rows.append([kind, str(len(same)), *map(mean_text, columns), *(f"{number:.2f}" for number in fit(same))])
    return Table(header, rows, "Means, and the fit gold - gold at the start = d (a - b log d), d = sqrt(KL)")


def curve_table(curves: Sequence[Curve]) -> Table:
    header = (
        "training", "seed", "gold at the start", "at its peak", "at the end", "gain kept", "KL at the peak",
        "at the end", "proxy at the start", "at the peak", "at the end", "R^2 of d (a - b log d)",
    )  # fmt: skip
    rows = []
    for each in curves:
        numbers = [each.gold[0], each.gold[each.peak], each.gold[-1], each.kept, each.kl[each.peak], each.kl[-1],
                   each.proxy[0], each.proxy[each.peak], each.proxy[-1], fit([each])[2]]
        rows.append([each.kind, str(each.seed), *(f"{number:.2f}" for number in numbers)])
    return Table(header, rows, "Runs")


def draw(curves: Sequence[Curve], file: Path, *, shows_steps: bool = False) -> None:
    """Draw proxy and gold of each kind against d = sqrt(KL), with the fit.

    Each seed is a thin line; the thick one is the mean, in a band of one standard deviation of the seeds.

    Args:
        shows_steps: also draw gold of all kinds over the steps. What the first rollback of a run discards is dotted.
    """
    from matplotlib.figure import Figure

    kinds = by_kind(curves)
    count = len(kinds) + shows_steps
    figure = Figure(figsize=(5 * count, 4))
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    for axis, (kind, same) in zip(axes[0], kinds.items(), strict=False):
        d = [np.sqrt(np.maximum(each.kl, 0)) for each in same]
        for name, color in (("proxy", "#0072B2"), ("gold", "#D55E00")):
            _draw_band(axis, d, [getattr(each, name) for each in same], BIN, color, name)
        a, b, _ = fit(same)
        grid = np.linspace(0.05, max(float(each.max()) for each in d), 200)
        start = statistics.fmean(each.gold[0] for each in same)
        axis.plot(grid, start + grid * (a - b * np.log(grid)), "k--", lw=1.2, label=f"d ({a:.2f} - {b:.2f} log d)")
        axis.set(title=f"{kind}, {len(same)} seeds", xlabel="d = sqrt(KL of an answer in nats)", ylabel="reward")
    if shows_steps:
        _draw_steps(axes[0][-1], kinds)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _draw_steps(axis: Any, kinds: Mapping[str, Sequence[Curve]]) -> None:
    for (kind, same), color in zip(kinds.items(), COLORS, strict=False):
        _draw_band(axis, [_steps(each.gold) for each in same], [each.gold for each in same], 1.0, color, kind)
        for each in same:
            axis.plot(_steps(each.first_gold), each.first_gold, ":", color=color, lw=0.6)
    axis.set(title="gold over the steps", xlabel="step")


def _steps(values: np.ndarray) -> np.ndarray:
    return np.arange(1.0, len(values) + 1)


def _draw_band(
    axis: Any, x: Sequence[np.ndarray], y: Sequence[np.ndarray], width: float, color: str, label: str
) -> None:
    """Draw a line for each seed, and their mean and standard deviation in bins that at least half of them reach."""
    for xs, ys in zip(x, y, strict=True):
        axis.plot(xs, ys, color=color, lw=0.6, alpha=0.35)
    centres, mean, deviation = band(x, y, width)
    axis.plot(centres, mean, color=color, lw=2, label=label)
    axis.fill_between(centres, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)


def band(
    x: Sequence[np.ndarray], y: Sequence[np.ndarray], width: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (middles of the bins, means of y over the seeds, standard deviations over them).

    A seed's value in a bin is the mean of its points there. Bins with points of less than half of the seeds are left
    out.
    """
    bins = [np.floor(xs / width).astype(int) for xs in x]
    found = []
    for number in range(max(int(each.max()) for each in bins) + 1):
        values = [float(ys[each == number].mean()) for each, ys in zip(bins, y, strict=True) if (each == number).any()]
        if 2 * len(values) >= len(x):
            found.append(((number + 0.5) * width, statistics.fmean(values), float(np.std(values))))
    centres, mean, deviation = np.array(found).T
    return centres, mean, deviation
