"""Run directories of finished runs, with known numbers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.telemetry.timeline import STATES
from async_rl.tools.sweeps.cells import (
    Bound,
    Cell,
    all_cells,
    cell_config,
    make_record,
    seed_axis,
    staleness_axis,
    write_record,
)
from async_rl.tools.sweeps.sweep import CellPlace, Sweep
from buffer.simulate import Workload, simulate

WORKLOAD = Workload(
    concurrency=64, prompts_per_step=16, train_s=0.4, train_cv=0.1, sync_s=0.05, group_mean_s=0.2, load_s=0.02,
    group_cv=0.3,
)  # fmt: skip
EVAL_EVERY = 10


def base_yaml(folder: Path) -> Path:
    path = folder / "base.yaml"
    path.write_text(
        "{model: {path: none}, task: {name: reasoning_gym/chain_sum}, logging: {wandb: disabled}, "
        f"rollout: {{max_groups_in_flight: {WORKLOAD.concurrency}}}, "
        f"learner: {{prompts_per_step: {WORKLOAD.prompts_per_step}}}}}"
    )
    return path


def make_sweep(
    folder: Path, bounds: Sequence[int | str] = (0, 1, 3), seeds: int = 3, steps: int = 40,
    workload: Workload = WORKLOAD, overrides: Sequence[str] = (),
) -> Path:
    """Cells with the simulator's times for `workload`, in which learning slows with the square of staleness.

    Args:
        overrides: the workload's rules as overrides of a config.
    """
    config = str(base_yaml(folder))
    sweep = folder / "sweep"
    axes = [staleness_axis(",".join(map(str, bounds))), seed_axis(seeds, 0)]
    for cell in all_cells(axes, sweep):
        write_cell(cell, steps, workload)
        resolved = cell_config(config, overrides, cell)
        (cell.folder / "config.yaml").write_text(dump_config(resolved))
        write_record(cell, make_record(cell, resolved, 60.0, f"async-rl train {config}", "abc1234"))
    return sweep


def taught(version: int, depth: float) -> float:
    """The accuracy of a policy version, and the reward of what it samples."""
    return 0.3 + 0.01 * version * (1 - 0.05 * depth**2)


def write_cell(cell: Cell, steps: int, workload: Workload = WORKLOAD) -> None:
    level, seed = Bound.parse(cell.labels["staleness"]), int(cell.labels["seed"])
    rng = np.random.default_rng((*map(int, re.findall(r"\d+", str(level))), seed))
    result, bound = simulate(workload, level.max, steps, seed, level.depth), level.depth
    in_flight = result.in_flight * workload.concurrency / max(result.rollout, 0.1)
    group_s = workload.group_s(in_flight)
    at_a_server = in_flight / workload.servers
    cell.folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "eval/accuracy": 0.3}]
    for step in range(1, steps + 1):
        accuracy = taught(step, bound) + rng.normal(0, 0.004)
        staleness = min(level.max, step - 1)
        reward = taught(step - 1 - staleness, bound) + rng.normal(0, 0.004)
        record = {
            "step": step, "time/since_first_step_s": (step - 1) * result.step_s,
            "time/step_s": result.step_s, "staleness/max": float(level.max),
            "staleness/mean": result.mean_staleness, f"staleness/episodes_{staleness}": 128.0, "reward/mean": reward,
            f"by_staleness/{min(staleness, 10)}/reward": reward,
            "offpolicy/is_weight_var": 0.1 * bound * rng.lognormal(0, 0.1), "offpolicy/ess": 1 / (1 + 0.1 * bound),
            "offpolicy/kl_behaviour_proximal_k3": 0.01 * bound, "time/train_s": workload.train_s,
            "time/wait_data_s": 0.001, "rollout/groups": workload.prompts_per_step, "rollout/group_s": group_s,
            "rollout/group_s_squared": group_s**2 * (1 + workload.group_cv**2), "rollout/concurrency": at_a_server,
        }  # fmt: skip
        if step % workload.every_steps == 0:
            # time/sync_s also has the turns of the memory, far more here; the prediction must not use it.
            record |= {"time/push_s": workload.sync_s, "push/pause_s": workload.sync_s, "time/sync_s": 9.0}
        lines.append(record)
        if step % EVAL_EVERY == 0 or step == steps:
            lines.append({"step": step, "eval/accuracy": accuracy})
    (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sync = workload.sync_s / workload.every_steps / result.step_s
    summary = {
        "steps": steps, "seconds": (steps - 1) * result.step_s, "staleness_mean": result.mean_staleness,
        "staleness_max": level.max, "occupancy/rollout": result.in_flight, "accuracy_start": 0.3,
        "accuracy_end": accuracy,
        "buffer": {"buffer/trained": 16.0 * steps, "buffer/dropped_late": 4.0},
        **{f"utilisation/{kind}/{state}": 0.0 for kind in ("learner", "rollout") for state in STATES[1:]},
        "utilisation/learner": result.utilisation, "utilisation/rollout": result.rollout,
        "utilisation/learner/sync": sync, "utilisation/rollout/sync": sync,
        "utilisation/learner/wait_data": 1 - result.utilisation - sync,
        "utilisation/rollout/wait_weights": 1 - result.rollout - sync,
    }  # fmt: skip
    (cell.folder / "summary.json").write_text(json.dumps(summary))


def make(folder: Path, **changes: Any) -> Sweep:
    axes = (staleness_axis("1,0"), seed_axis(2, 0))
    arguments = {"config": str(base_yaml(folder)), "axes": axes, "folder": folder / "sweep", **changes}
    return Sweep(**arguments)


class Trainer:
    """Remembers the cells that it was called for and writes their runs; fails for one of them.

    Args:
        meets: with so many cells at once; each waits for the others.
    """

    def __init__(self, fails: str = "", meets: int = 1) -> None:
        self.fails = fails
        self.cells: list[str] = []
        self.places: list[CellPlace] = []
        self.commands: list[Sequence[str]] = []
        self.barrier, self.lock, self.busy = threading.Barrier(meets), threading.Lock(), set[CellPlace]()

    def __call__(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
        with self.lock:
            assert place not in self.busy, "a place has one cell at a time"
            self.busy.add(place)
        try:
            return self.train(command, cell, place)
        finally:
            with self.lock:
                self.busy.remove(place)

    def train(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
        self.barrier.wait(5)
        self.cells.append(cell.name)
        self.places.append(place)
        self.commands.append(command)
        if cell.name == self.fails:
            return "it did not work"
        write_cell(cell, steps=12)
        config = load_config(command[2], [word for word in command[3:] if "=" in word])
        (cell.folder / "config.yaml").write_text(dump_config(config))
        return ""
