"""How long a server takes to join a running run, and what that costs the others.

    python -m benchmarks.joining CONFIG --engine hf,sglang --times 3 overrides ...

A run has one server. A second one joins, serves for a while and is removed, several times. Measured are the seconds
from the request until its engine is up, until it has the newest weights and serves, and until its first group is in the
buffer (its first sampled token comes between these two); the seconds of the learner in the fill; and the longest of the
three steps around the fill beside the median step.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.elastic_matrix import DisturbedRun
from benchmarks.page import machine_text, write_page

RESULTS = Path(__file__).parent / "results" / "joining"
SERVES_S = 20.0


def groups_of(run: DisturbedRun, worker: str) -> int:
    """Return how many groups of a worker have arrived in the buffer."""
    journal = f"file:{run.run_dir}/trajectories.sqlite?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(journal, uri=True)) as db:
        found = db.execute("select count(*) from groups where worker = ? and duration_s > 0", (worker,)).fetchone()
        return int(found[0])
    return 0


def end_drain(run: DisturbedRun, times_before: int) -> None:
    run.wait(lambda: run.lines("rollout/1 is gone") > times_before, "the end of the drain")


def join_once(run: DisturbedRun) -> dict[str, float]:
    """Let rollout/1 join and leave again, and return the measured seconds."""
    up, serves = run.lines("its engine is up"), run.lines("rollout/1 is back") + run.lines("rollout/1 has joined")
    before, began_s = groups_of(run, "rollout/1"), time.monotonic()
    run.ask("max", "2")
    found = {}
    run.wait(lambda: run.lines("its engine is up") > up, "the engine")
    found["engine up"] = time.monotonic() - began_s
    run.wait(lambda: run.lines("rollout/1 is back") + run.lines("rollout/1 has joined") > serves, "the weights")
    found["has the weights"] = time.monotonic() - began_s
    run.wait(lambda: groups_of(run, "rollout/1") > before, "a group")
    found["first group"] = time.monotonic() - began_s
    time.sleep(SERVES_S)
    gone = run.lines("rollout/1 is gone")
    run.ask("remove", "rollout/1")
    end_drain(run, gone)
    steps = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    fills = [number for number, step in enumerate(steps) if number and step.get("push/filled_servers")]
    found["fill"] = steps[fills[-1]]["push/fill_s"]
    near = [step.get("time/step_s", 0.0) for step in steps[fills[-1] - 1 : fills[-1] + 2]]
    found["longest step"] = max(near)
    found["median step"] = statistics.median(step["time/step_s"] for step in steps if "time/step_s" in step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--engine", default="hf,sglang")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    found: list[dict[str, Any]] = []
    for engine in arguments.engine.split(","):
        folder = Path(tempfile.mkdtemp(prefix=f"joining-{engine}-"))
        run = DisturbedRun(arguments.config, engine, "group", arguments.overrides, folder, most=2)
        try:
            run.ask("remove", "rollout/1")
            end_drain(run, 0)
            for _ in range(arguments.times):
                found.append({"engine": engine, **join_once(run)})
                print(found[-1], flush=True)
        finally:
            run.command.kill()
    columns = [name for name in found[0] if name != "engine"]
    lines = []
    for engine in dict.fromkeys(each["engine"] for each in found):
        rows = [each for each in found if each["engine"] == engine]
        values = [[each[name] for each in rows] for name in columns]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in values]
        lines.append([engine, str(len(rows)), *cells])
    table = Table(("engine", "joins", *(f"{name}, s" for name in columns)), lines).markdown()
    page = f"A second server joins a running run. {machine_text()}.\n\n{table}\nMedian (least to most).\n"
    page += f"\n```\n{__doc__}```\n"
    write_page(arguments.out, page, {"machine": describe_machine(), "joins": found})


if __name__ == "__main__":
    main()
