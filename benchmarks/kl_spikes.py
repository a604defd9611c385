"""Shows what makes the spikes of KL in runs: tokens that are older than most of their batch, or the policy itself.

    python -m benchmarks.kl_spikes RUN_DIR ...

For the steps with the largest KL(behaviour || proximal) of each run, a table has their KL, which share of it comes from
old tokens, which share of the tokens these are, and what the KL of the batch would be without them. Old is a token with
more versions than the depth, rounded up. If a spike stays without them, the policy has moved far in few versions, and
the old groups are not its cause. The last lines add up the runs with the same bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from async_rl.sweeps.cells import Bound
from async_rl.sweeps.tables import Table
from async_rl.telemetry.metrics import read_metrics
from learner.algorithms.diagnostics import BUCKETS

KL = "kl_behaviour_proximal_k3"
SPIKES = 3
"""The number of steps of a run that count as its spikes."""


@dataclass(frozen=True, slots=True)
class Spike:
    """One step: its KL in nats a token, and sums of KL over all of its tokens and over the old ones."""

    run: str
    bound: Bound
    step: int
    tokens: float
    old_tokens: float
    total: float
    old: float
    staleness: float
    """The mean over its episodes."""

    @property
    def kl(self) -> float:
        return self.total / self.tokens


def spikes_of(run_dir: Path, count: int = SPIKES) -> list[Spike]:
    """Return the `count` steps of a run with the largest KL, the largest first."""
    bound = Bound.of_config(yaml.safe_load((run_dir / "config.yaml").read_text())["staleness"])
    found = []
    for step in read_metrics(run_dir / "metrics.jsonl"):
        cells = {
            age: (tokens, tokens * (step.get(f"by_staleness/{age}/{KL}") or 0.0))
            for age in range(BUCKETS) if (tokens := step.get(f"by_staleness/{age}/tokens"))
        }
        if cells:
            old = [cell for age, cell in cells.items() if age > math.ceil(bound.depth)]
            found.append(Spike(
                run=run_dir.name, bound=bound, step=int(step["step"] or 0), staleness=step.get("staleness/mean") or 0.0,
                tokens=sum(tokens for tokens, _ in cells.values()), total=sum(kl for _, kl in cells.values()),
                old_tokens=sum(tokens for tokens, _ in old), old=sum(kl for _, kl in old),
            ))  # fmt: skip
    return sorted(found, key=lambda spike: -spike.kl)[:count]


def spike_table(spikes: Sequence[Spike]) -> Table:
    header = (
        "run", "depth/bound", "step", "staleness, mean", "KL, nats a token", "of it from old tokens",
        "old tokens of all", "KL without them",
    )  # fmt: skip
    rows = [[s.run, str(s.bound), str(s.step), f"{s.staleness:.2f}", *_shares([s])] for s in spikes]
    for bound in sorted({spike.bound for spike in spikes}):
        same = [spike for spike in spikes if spike.bound == bound]
        age = sum(spike.staleness for spike in same) / len(same)
        rows.append([f"all {len({spike.run for spike in same})}", str(bound), "", f"{age:.2f}", *_shares(same)])
    return Table(header, rows)


def _shares(spikes: Sequence[Spike]) -> list[str]:
    tokens, total = sum(spike.tokens for spike in spikes), sum(spike.total for spike in spikes)
    old_tokens, old = sum(spike.old_tokens for spike in spikes), sum(spike.old for spike in spikes)
    without = (total - old) / (tokens - old_tokens) if tokens > old_tokens else math.nan
    share = old / total if total else 0.0
    return [f"{total / tokens:.3f}", f"{share:.1%}", f"{old_tokens / tokens:.1%}", f"{without:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    spikes = [spike for run in parser.parse_args().runs for spike in spikes_of(run)]
    print(spike_table(spikes).markdown())


if __name__ == "__main__":
    main()
