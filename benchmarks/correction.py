"""The failure that correction prevents: exact staleness, no correction against coupled clip and decoupled + token TIS.

    python -m benchmarks.correction configs/quickstart.yaml
    python -m benchmarks.correction configs/quickstart.yaml --name correction_3e-4 learner.lr=3e-4 run.steps=200

`staleness.mode: exact` gives every batch the same staleness, so that only the algorithm differs. The same learning rate
at staleness 0 shows that it is stable there. One table in benchmarks/results/<name>.md, with the numbers of every run
in <name>.json. Finished runs are kept under run.dir, so that the same command continues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.config.loading import load_config
from benchmarks.cells import CORRECTIONS, MODES, Axis, seed_axis
from benchmarks.presets import by_label, parser_of, run_table
from benchmarks.results import Run
from benchmarks.statistics import estimate, welch
from benchmarks.sweep import Sweep

SETTING = "setting"
BASE = ("rollout.engine=hf", "run.steps=120", "learner.decay_fraction=0", "eval.samples=4", "learner.lr=6e-4")
"""Twice the quickstart's learning rate: at staleness 0 it learns faster still."""
SYNCHRONOUS, NONE, CORRECTED = "synchronous", "none", "decoupled_tis"


def setting_axis(staleness: int) -> Axis:
    """Staleness 0, and every correction at `staleness`."""
    stale = (*MODES["exact"], f"staleness.max={staleness}")
    levels = {name: (*stale, *overrides) for name, overrides in CORRECTIONS.items()}
    return Axis(SETTING, {SYNCHRONOUS: ("staleness.max=0",), **levels})


def correction_table(runs: Sequence[Run]) -> str:
    """A row a setting, and what the test between no correction and decoupled + token TIS says."""
    groups = by_label(runs, SETTING)
    lines = [
        "| setting | seeds | staleness | accuracy, start | accuracy, end | mean reward | KL behaviour→proximal (k3) | "
        "ESS/N | entropy, end |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, same in groups.items():
        cells = [
            f"{estimate([run.mean('staleness/mean') for run in same]).mean:.2f}",
            estimate([run.evals[0][2] for run in same]).text("{:.3f}"),
            estimate([run.evals[-1][2] for run in same]).text("{:.3f}"),
            estimate([run.mean("reward/mean") for run in same]).text("{:.3f}"),
            f"{estimate([run.mean('offpolicy/kl_behaviour_proximal_k3') for run in same]).mean:.3g}",
            f"{estimate([run.mean('offpolicy/ess') for run in same]).mean:.3f}",
            f"{estimate([run.points('policy/entropy')[-1][2] for run in same]).mean:.3f}",
        ]
        lines.append(f"| {name} | {len(same)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _verdict(groups)]) + "\n"


def _verdict(groups: dict[str, list[Run]]) -> str:
    if NONE not in groups or CORRECTED not in groups:
        return "Not all settings have finished."
    lines = []
    for label, value in (
        ("held-out accuracy at the end", lambda run: run.evals[-1][2]),
        ("mean reward over the run", lambda run: run.mean("reward/mean")),
    ):
        test = welch([value(run) for run in groups[CORRECTED]], [value(run) for run in groups[NONE]])
        lines.append(
            f"{CORRECTED} against {NONE}, {label}: {test.difference:+.3f}, p = {test.p_value:.2g} (Welch): "
            + ("different." if test.is_significant else "not separable with these seeds.")
        )
    return "\n\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, seeds=5)
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--name", default="correction", help="of the result and of the folder under run.dir")
    arguments = parser.parse_intermixed_args()
    overrides = (*BASE, *arguments.overrides)
    axis = setting_axis(arguments.staleness)
    sweep = Sweep(
        config=arguments.config, overrides=overrides, axes=(axis, seed_axis(arguments.seeds, 0)),
        folder=Path(load_config(arguments.config, overrides).run.dir) / arguments.name, max_cells=arguments.max_cells,
    )
    lr = load_config(arguments.config, overrides).learner.lr
    title = f"What correction prevents at exact staleness {arguments.staleness}, learning rate {lr:g}"
    return run_table(sweep, arguments.out / arguments.name, title, correction_table, list(axis.levels), SETTING)


if __name__ == "__main__":
    sys.exit(main())
