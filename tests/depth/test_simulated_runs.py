"""`staleness.depth: auto` in simulated runs that learn, against fixed bounds and constant depths below the ceiling.

The runs and what they learn are those of tests/kit/depth/world.py. With exponent 0 staleness costs nothing, and speed
alone counts; 0.19 is what it cost with this project's default correction, 0.286 over all corrections.
"""

from __future__ import annotations

from functools import cache

import pytest

from async_rl.config.data import AUTO_START
from tests.kit.depth.world import CEILING, TARGET, WORLDS, LearningRun, World

DEPTHS = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
QUICK = (
    "short, engine full", "cv 1", "bimodal tools", "server lost half-way", "rollout slower, full",
    "switch: short, tools, sensitive",
)
QUICK_WORLDS = [world for world in WORLDS if world.name in QUICK]
CHANGING = [world for world in WORLDS if "sensitive late" in world.name or world.name.startswith("switch")]
"""The cost of staleness, the tools, the load or the learner change so that another bound is the best at the end."""
SEEDS = 4
SLOW_MACHINE_S = 4 * 3600
"""All worlds with one exponent take 35 minutes of a core; whichever test comes first simulates them."""
SHORT = 24.0
"""The synchronous steps' worth of a short run, in which the start counts."""


@cache
def score(world: World, exponent: float, setting: str, seeds: int, target: float = TARGET) -> float:
    """The mean score over the seeds, of a `bound 4`, a `depth 1.5`, `auto`, or auto that begins with another depth:
    `auto 1`.
    """
    kind, _, value = setting.partition(" ")
    number = float(value or AUTO_START)
    runs = (
        LearningRun(world, seed, exponent, number, int(number) if kind == "bound" else CEILING, kind == "auto", target)
        for seed in range(seeds)
    )
    return sum(run.learn().score for run in runs) / seeds


def best_bound(world: World, exponent: float, seeds: int) -> float:
    return max(score(world, exponent, f"bound {bound}", seeds) for bound in range(CEILING + 1))


def best_depth(world: World, exponent: float, seeds: int) -> float:
    return max(score(world, exponent, f"depth {depth}", seeds) for depth in DEPTHS)


def of(world: World, exponent: float, seeds: int, other: float) -> float:
    return score(world, exponent, "auto", seeds) / other


@pytest.mark.processes
@pytest.mark.parametrize("world", QUICK_WORLDS, ids=str)
def test_auto_learns_no_slower_than_the_best_fixed_bound(world: World) -> None:
    bounds = [score(world, 0.286, f"bound {bound}", 1) for bound in (1, 4, 8)]
    assert of(world, 0.286, 1, max(bounds)) >= 0.99
    for depth in (1.25, 1.5):
        assert of(world, 0.286, 1, score(world, 0.286, f"depth {depth}", 1)) >= 0.96


@pytest.mark.processes
@pytest.mark.parametrize("exponent", [0.0, 0.286])
def test_a_short_run_of_auto_loses_little_to_the_depth_with_which_it_begins(exponent: float) -> None:
    for world in QUICK_WORLDS:
        begun = score(world, exponent, f"depth {AUTO_START}", 1, SHORT)
        assert score(world, exponent, "auto", 1, SHORT) >= 0.96 * begun, world.name


@pytest.mark.nightly
@pytest.mark.timeout(SLOW_MACHINE_S)
@pytest.mark.parametrize("exponent", [0.0, 0.286])
def test_short_runs_of_auto_learn_faster_if_they_begin_with_1_25_than_with_1(exponent: float) -> None:
    shares = print_starts(exponent)
    assert sum(shares["auto 1.25"]) > sum(shares["auto 1"])


@pytest.mark.nightly
@pytest.mark.timeout(SLOW_MACHINE_S)
@pytest.mark.parametrize(("exponent", "least", "mean"), [(0.0, 0.96, 0.96), (0.19, 0.99, 1.15), (0.286, 0.99, 1.20)])
def test_auto_beats_every_fixed_bound_over_all_worlds(exponent: float, least: float, mean: float) -> None:
    print_table(exponent)
    shares = {world.name: of(world, exponent, SEEDS, best_bound(world, exponent, SEEDS)) for world in WORLDS}
    assert min(shares.values()) >= least, shares
    assert sum(shares.values()) / len(shares) >= mean, shares


@pytest.mark.nightly
@pytest.mark.timeout(SLOW_MACHINE_S)
@pytest.mark.parametrize("exponent", [0.0, 0.19, 0.286])
def test_auto_is_near_the_best_constant_depth_and_loses_little_to_usual_ones(exponent: float) -> None:
    for world in WORLDS:
        assert of(world, exponent, SEEDS, best_depth(world, exponent, SEEDS)) >= 0.95, world.name
        for depth in (1.25, 1.5):
            assert of(world, exponent, SEEDS, score(world, exponent, f"depth {depth}", SEEDS)) >= 0.96, world.name


@pytest.mark.nightly
@pytest.mark.timeout(SLOW_MACHINE_S)
@pytest.mark.parametrize("exponent", [0.0, 0.19, 0.286])
def test_where_tools_make_the_tail_auto_beats_the_usual_constant_depths(exponent: float) -> None:
    tools = next(world for world in WORLDS if world.name == "bimodal tools")
    for depth in (1.25, 1.5):
        assert of(tools, exponent, SEEDS, score(tools, exponent, f"depth {depth}", SEEDS)) >= 1.05, depth


@pytest.mark.nightly
@pytest.mark.timeout(SLOW_MACHINE_S)
@pytest.mark.parametrize("world", CHANGING, ids=str)
def test_where_the_best_bound_changes_auto_is_ahead_of_every_bound(world: World) -> None:
    assert of(world, 0.286, SEEDS, best_bound(world, 0.286, SEEDS)) >= 1.2
    assert of(world, 0.286, SEEDS, best_depth(world, 0.286, SEEDS)) >= 0.98


def print_table(exponent: float) -> None:
    """Print all worlds, each when it is known, as shares of the best fixed bound up to the ceiling."""
    columns = ["bound 1", "bound 8", "depth 1.25", "depth 1.5", "auto"]
    print(f"\nexponent {exponent:g}\n| world | best bound | best depth |", " | ".join(columns), "|")
    print("| --- |" + " ---: |" * (len(columns) + 2))
    for world in WORLDS:
        best = best_bound(world, exponent, SEEDS)
        found = [best_depth(world, exponent, SEEDS), *(score(world, exponent, name, SEEDS) for name in columns)]
        print(f"| {world.name} | {best:.2f} |", " | ".join(f"{value / best:.2f}" for value in found), "|", flush=True)


def print_starts(exponent: float) -> dict[str, list[float]]:
    """Print short runs of auto by the depth with which they begin, as shares of the best of four constant depths.

    Returns the shares by setting.
    """
    constant = ("depth 1", "depth 1.25", "depth 1.5", "depth 2")
    shares: dict[str, list[float]] = {name: [] for name in (*constant[:3], "auto 1", "auto 1.25", "auto 1.5")}
    print(f"\nexponent {exponent:g}, short runs\n| world |", " | ".join(shares), "|\n| --- |" + " ---: |" * len(shares))
    for world in QUICK_WORLDS:
        best = max(score(world, exponent, name, SEEDS, SHORT) for name in constant)
        for name, found in shares.items():
            found.append(score(world, exponent, name, SEEDS, SHORT) / best)
        print(f"| {world.name} |", " | ".join(f"{found[-1]:.3f}" for found in shares.values()), "|")
    print("| mean |", " | ".join(f"{sum(found) / len(found):.3f}" for found in shares.values()), "|")
    return shares
