"""Checks the journal and the metrics of a run that has ended, for example after servers have joined, left and died.

    python -m benchmarks.run_audit RUN_DIR

    exactly once   each admitted group is trained once or dropped with a reason; each batch is full; no version has no
                   batch; no prompt is trained in two groups (within one epoch of prompts)
    nothing lost   each prompt of a group that was lost with its server or in a resume is granted again, or is in the
                   buffer's queue of such prompts when the run ends
    bound          no trained row is older than staleness.max
    accounting     admitted = trained + dropped, and the counters are those of the tables
    membership     a worker has groups only of versions next to a push that reached it, or at which servers joined
    utilisation    the shares of each kind of pool add up to 1 in every step and in the summary
    exact mode     each trained group is of the one right version
"""

from __future__ import annotations

import json
import sqlite3
import sys
from bisect import bisect_left
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml


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
    # only a resume drops groups whose worker is not known
    lost = (
        "select count(*) from groups a where a.state = 'dropped' and (a.error like '%is gone' or a.worker = '') "
        "and not exists (select 1 from groups b where b.prompt_index = a.prompt_index and b.group_id > a.group_id) "
        "and a.prompt_index not in (select value from state, json_each(state.scalars, '$.requeued'))"
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
        "prompts of lost groups are granted again": wrong(lost),
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
    pushes: dict[str, set[int]] = {}
    for step in steps:
        for key in step:
            if key.startswith("version/rollout"):
                pushes.setdefault(key.removeprefix("version/"), set()).add(int(step[key]))
    versions = sorted(set().union(*pushes.values()))
    fills = {int(step["step"]) for step in steps if step.get("push/filled_servers")}
    found: dict[str, str] = {}
    sql = "select distinct worker, start_version from groups where worker <> '' order by 1, 2"
    for worker, start in db.execute(sql):
        i = bisect_left(versions, start)
        # a server that joins samples before the first common push reaches it; one that leaves got a last push
        near = {*versions[max(0, i - 1) : i + 2]}
        is_right = near & pushes.get(worker, set()) or {start, start + 1} & fills
        check = f"{worker} has groups of its time alone"
        found[check] = found.get(check, "") + ("" if is_right else f"version {start} ")
    return found


if __name__ == "__main__":
    results = audit(Path(sys.argv[1]))
    for check, problem in results.items():
        print(f"{'BAD' if problem else 'ok '} {check} {problem}")
    sys.exit(any(results.values()))
