"""Checks the journal and the metrics of a run that has ended, for example after servers have joined, left and died.

    python -m benchmarks.run_audit RUN_DIR

    exactly once   each admitted group is trained once or dropped with a reason; each batch is full; no version has no
                   batch; no prompt is trained in two groups (within one epoch of prompts)
    nothing lost   each prompt of a group that was lost with its server is granted again
    bound          no trained row is older than staleness.max
    accounting     admitted = trained + dropped, and the counters are those of the tables
    membership     a worker has no group that was granted outside the versions that were pushed to it
    utilisation    the shares of each kind of pool add up to 1 in every step and in the summary
    exact mode     each trained group is of the one right version
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

LAST_GROUPS = 64
"""At most so many prompts of lost groups need not be granted again, because the run ended before."""


def audit(run_dir: Path) -> dict[str, str]:
    """Return {check: what is wrong, or "" if it holds} of a run that has ended."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    with closing(sqlite3.connect(f"file:{run_dir}/trajectories.sqlite?mode=ro", uri=True)) as db:
        found = {**_of_groups(db, config, summary["buffer"]), **_of_workers(db, steps)}
    for kind in ("rollout", "learner"):
        sums = [
            sum(v for k, v in step.items() if k == f"utilisation/{kind}" or k.startswith(f"utilisation/{kind}/"))
            for step in steps if f"utilisation/{kind}" in step
        ]
        off = max((abs(each - 1) for each in sums), default=0.0)
        found[f"shares of {kind} add up to 1"] = f"off by {off}" if off > 1e-9 else ""
    off = max((abs(sum(shares.values()) - 1) for shares in summary.get("pools", {}).values()), default=0.0)
    found["shares of each server add up to 1"] = f"off by {off}" if off > 1e-9 else ""
    return found


def _of_groups(db: sqlite3.Connection, config: dict[str, Any], counters: dict[str, float]) -> dict[str, str]:
    def one(sql: str) -> Any:
        return db.execute(sql).fetchone()[0]

    def wrong(sql: str) -> str:
        return str(number) if (number := one(sql)) else ""

    sizes = {n for (n,) in db.execute("select count(*) from uses group by version")}
    left_out = one("select max(version) + 1 - min(version) - count(distinct version) from uses")
    bound, worst = config["staleness"]["max"], one("select coalesce(max(staleness), 0) from trained")
    held = one("select count(*) from groups where state = 'held'")
    reasons = sum(v for k, v in counters.items() if k.startswith("buffer/dropped_") and k.count("/") == 1)
    again = one(
        "select count(*) from groups a where a.state = 'dropped' and a.error like '%is gone' and not exists "
        "(select 1 from groups b where b.prompt_index = a.prompt_index and b.group_id > a.group_id)"
    )
    found = {
        "each group has ended": wrong("select count(*) from groups where state not in ('trained', 'dropped', 'held')"),
        "no group is trained twice": wrong(
            "select count(*) from (select group_id from uses group by 1 having count(*) > 1)"
        ),
        "no prompt is trained in two groups": wrong(
            "select count(*) from (select prompt_index from groups join uses using (group_id) group by 1 "
            "having count(*) > 1)"
        ),
        "each batch is full": "" if len(sizes) == 1 else str(sizes),
        "each version has a batch": str(left_out) if left_out else "",
        "prompts of lost groups are granted again": str(again) if again > LAST_GROUPS else "",
        "no trained row is older than the bound": f"{worst} > {bound}" if worst > bound else "",
        "admitted = trained + dropped": (
            "" if counters["buffer/admitted"] == counters["buffer/trained"] + reasons + held else str(counters)
        ),
        "the tables count the same": (
            "" if one("select count(*) from groups") == counters["buffer/admitted"] else str(counters)
        ),
    }
    if config["staleness"].get("mode") == "exact":
        found["each trained group is of the one right version"] = wrong(
            f"select count(*) from groups where state = 'trained' and (start_version != max(0, exact_batch - {bound}) "
            "or newest_version != start_version)"
        )
    return found


def _of_workers(db: sqlite3.Connection, steps: list[dict[str, float]]) -> dict[str, str]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step in steps:
        for key in step:
            if key.startswith("version/rollout"):
                name = key.removeprefix("version/")
                first.setdefault(name, int(step[key]))
                last[name] = int(step[key])
    found = {}
    sql = "select worker, min(start_version), max(start_version) from groups group by 1"
    for worker, low, high in db.execute(sql):
        # a filled server samples from a version before the first common push reaches it
        is_right = low >= first.get(worker, 0) - 1 and high <= last.get(worker, high) + 1
        what = f"groups of versions {low} to {high}, pushes of {first.get(worker)} to {last.get(worker)}"
        found[f"{worker} has groups of its time alone"] = "" if is_right else what
    return found


if __name__ == "__main__":
    results = audit(Path(sys.argv[1]))
    for check, problem in results.items():
        print(f"{'BAD' if problem else 'ok '} {check} {problem}")
    sys.exit(any(results.values()))
