"""Train on stale data with no correction, with coupled clip, and with decoupled clip and token TIS, over seeds.

    python -m benchmarks.correction configs/quickstart.yaml
    python -m benchmarks.correction configs/quickstart.yaml --name correction_3e-4 learner.lr=3e-4 run.steps=200

`staleness.mode=exact` gives every batch the same staleness, so that only the algorithm differs. The setting
`synchronous` has the same learning rate at staleness 0 and shows that it is stable there. The report is in the folder
<name> of run.dir. Finished runs are kept: the same command continues.
"""

from __future__ import annotations

import sys

from benchmarks.cells import CORRECTIONS, MODES, Axis
from benchmarks.presets import make_parser, run_axis

BASE = (
    *MODES["exact"], "rollout.engine=hf", "run.steps=120", "learner.decay_fraction=0", "eval.samples=4",
    "learner.lr=6e-4",
)  # fmt: skip
"""The learning rate is twice the quickstart's: at staleness 0 the policy learns even faster with it."""


def setting_axis(staleness: int) -> Axis:
    """An axis with staleness 0, and every correction at `staleness`."""
    levels = {name: (f"staleness.max={staleness}", *overrides) for name, overrides in CORRECTIONS.items()}
    return Axis("correction", {"synchronous": ("staleness.max=0",), **levels})


def main() -> int:
    parser = make_parser(__doc__, seeds=5)
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--name", default="correction", help="folder under run.dir")
    arguments = parser.parse_intermixed_args()
    return run_axis(arguments, BASE, setting_axis(arguments.staleness), arguments.name)


if __name__ == "__main__":
    sys.exit(main())
