"""Tells how much a policy's reward depends on the version for which an answer that several versions sampled counts.

    python -m benchmarks.credited_versions SWEEP_DIR --out FILE

In reports such an answer counts for the oldest of its versions (async_rl/sweeps/policy_curve.py). That flatters runs
whose answers span many versions. Here the journals of a sweep's runs are read, and answers count for the oldest, for
the middle (rounded down) or for the newest version that sampled them. The first table has the reward of the policy over
the time of each setting; the second what each depth gains over the bound of the same number, in the mean over the
larger bounds.
"""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from scipy import stats

from async_rl.sweeps.cells import Bound
from async_rl.sweeps.policy_curve import PolicyCurve, curve_of_credited, mean_rewards
from async_rl.sweeps.results import Run, read_runs
from async_rl.sweeps.statistics import estimate
from async_rl.sweeps.tables import Table, write_page

Answer = tuple[int, int, float]
"""An answer: the oldest and the newest version that sampled it, and its reward."""
CREDITED: dict[str, Callable[[int, int], int]] = {
    "oldest": lambda oldest, newest: oldest,
    "middle": lambda oldest, newest: (oldest + newest) // 2,
    "newest": lambda oldest, newest: newest,
}
ANSWERS = """
    SELECT MIN(oldest_version), MAX(newest_version), AVG(reward) FROM uses JOIN rows USING (group_id)
    GROUP BY group_id, uses.version, episode
"""


def answers_of(run_dir: Path) -> list[Answer]:
    """Return each answer, or episode of several turns, once for each batch in which the run trained on it."""
    journal = run_dir / "trajectories.sqlite"
    with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True)) as database:
        return list(database.execute(ANSWERS))


def curves_of(run: Run, answers: Sequence[Answer]) -> dict[str, PolicyCurve]:
    """Return the reward of each policy version by the way in which answers count for versions, see CREDITED."""
    curves = {}
    for name, version_of in CREDITED.items():
        credited: dict[int, list[tuple[float, float]]] = {}
        for oldest, newest, reward in answers:
            credited.setdefault(version_of(oldest, newest), []).append((1.0, reward))
        curves[name] = curve_of_credited(run.steps, credited)
    return curves


def rewards_of(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Return [setting][way] the mean reward over the time of each seed, and by "span" the versions of a mean answer."""
    answers = [answers_of(run.folder) for run in runs]
    curves = [curves_of(run, found) for run, found in zip(runs, answers, strict=True)]
    _, until_s = mean_rewards([run.policy_curve for run in runs])
    found: dict[str, dict[str, list[float]]] = {}
    for run, of_run, of_ways in zip(runs, answers, curves, strict=True):
        row = found.setdefault(str(run.staleness), {})
        row.setdefault("span", []).append(float(np.mean([newest - oldest + 1 for oldest, newest, _ in of_run])))
        for way, curve in of_ways.items():
            row.setdefault(way, []).append(curve.mean_over_time(until_s))
    return found


def gains_of(rewards: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Return [depth][way] what a depth gains over the bound of the same number, in the mean over bounds, per seed."""
    bounds = {name: bound for name in rewards if not (bound := Bound.parse(name)).is_auto}
    found: dict[str, dict[str, list[float]]] = {}
    for name in (name for name, bound in bounds.items() if bound.is_full):
        below = [other for other, bound in bounds.items() if bound.depth == bounds[name].max < bound.max]
        if below:
            found[name] = {
                way: [float(np.mean(each)) - full for *each, full in zip(
                    *(rewards[other][way] for other in below), rewards[name][way], strict=True
                )] for way in CREDITED
            }  # fmt: skip
    return found


def page_of(sweep: str, rewards: dict[str, dict[str, list[float]]]) -> str:
    rows = [
        [name, estimate(row["span"]).text("{:.2f}"), *(estimate(row[way]).text("{:.3f}") for way in CREDITED)]
        for name, row in rewards.items()
    ]
    gains = [
        [depth, *(
            f"{estimate(row[way]).text('{:.3f}')} (p = {stats.ttest_1samp(row[way], 0.0).pvalue:.4f})"
            for way in CREDITED
        )] for depth, row in gains_of(rewards).items()
    ]  # fmt: skip
    seeds = len(next(iter(rewards.values()))["span"])
    return (
        f"# The version for which an answer counts\n\n`python -m benchmarks.credited_versions {sweep}`, {seeds} seeds. "
        "The reward of the policy over the time, by the version for which an answer counts that several versions "
        f"sampled:\n\n{Table(('setting', 'versions of an answer', *CREDITED), rows).markdown()}\n"
        "What a depth gains over the bound of the same number, in the mean over the larger bounds:\n\n"
        f"{Table(('depth', *CREDITED), gains).markdown()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, metavar="SWEEP_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    rewards = rewards_of(read_runs(options.sweep))
    write_page(options.out, page_of(str(options.sweep), rewards), rewards)


if __name__ == "__main__":
    main()
