"""SIGKILL to each kind of process at a random moment of a run, and what came of it.

    python -m benchmarks.kill_matrix CONFIG --times 5 --kinds server,worker,learner,buffer [key=value ...]

server   SGLang's scheduler (with rollout.engine=sglang)       the run goes on, the server comes back
worker   a rollout process: worker and hf engine, or worker    the run goes on, it comes back
         and SGLang server
learner  a learner rank                                        the run ends with one error that names it
buffer   the buffer

Each run is checked: how it ended, that every admitted group is accounted for, that no token was older than the bound,
and that no process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine

MARK = "ASYNC_RL_KILL_MARK"
RESULTS = Path(__file__).parent / "results" / "kill_matrix.json"
VICTIMS = {
    "server": "sglang::scheduler", "worker": "ray::RolloutProcess", "learner": "ray::LearnerProcess",
    "buffer": "ray::BufferProcess",
}
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    after_s: float
    """From the second logged step to the kill."""
    exit_code: int
    ended_s: float
    """From the kill to the end of the command."""
    back_s: float
    """From the kill until the server served the current version again; 0 where none came back."""
    named: str
    """The process that the error names."""
    counts_add_up: bool
    staleness_max: float
    orphans: int


def kill_once(config: str, kind: str, overrides: list[str], rng: random.Random, folder: Path) -> Outcome:
    """One run with one SIGKILL."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    run_dir = folder / kind
    command = [sys.executable, "-m", "async_rl.cli", "train", config, f"run.dir={folder}", f"run.name={kind}"]
    output = folder / f"{kind}.log"
    with output.open("w") as out:
        process = subprocess.Popen(
            [*command, *overrides], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, MARK: mark},
            start_new_session=True,
        )
    try:
        _wait(lambda: _lines(run_dir / "metrics.jsonl") > 2 or process.poll() is not None, START_TIMEOUT_S)
        after_s = rng.uniform(0.0, 6.0)
        time.sleep(after_s)
        victims = [p for p in _marked(mark) if VICTIMS[kind] in f"{p.name()} {' '.join(p.cmdline()[:1])}"]
        if not victims:
            raise RuntimeError(f"no {VICTIMS[kind]} runs:\n{output.read_text()[-2000:]}")
        rng.choice(victims).send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        back_s = 0.0
        while process.poll() is None and time.monotonic() < killed_s + END_TIMEOUT_S:
            if not back_s and "is back, with" in output.read_text():
                back_s = time.monotonic() - killed_s
            time.sleep(0.1)
        ended_s = time.monotonic() - killed_s
        time.sleep(2.0)
        return _outcome(kind, after_s, process.wait(0), ended_s, back_s, output.read_text(), run_dir, mark)
    finally:
        for left in _marked(mark):
            left.kill()


def _outcome(
    kind: str, after_s: float, code: int, ended_s: float, back_s: float, text: str, run_dir: Path, mark: str
) -> Outcome:
    named = re.search(r"async-rl: error: (\S+)(?: on \S+)? (?:died|failed|stopped)", text)
    summary: dict[str, Any] = {}
    if (run_dir / "summary.json").exists():
        summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        kind=kind, after_s=round(after_s, 1), exit_code=code, ended_s=round(ended_s, 1), back_s=round(back_s, 1),
        named=named[1] if named else "", counts_add_up=_add_up(summary.get("buffer", {})),
        staleness_max=max((s["staleness/max"] for s in steps if "staleness/max" in s), default=0.0),
        orphans=len(_marked(mark)),
    )


def _add_up(counters: dict[str, float]) -> bool:
    """After a run's end nothing runs and nothing waits: admitted = trained + dropped."""
    reasons = [key for key in counters if key.startswith("buffer/dropped_") and key.count("/") == 1]
    dropped = sum(counters[key] for key in reasons)
    return bool(counters) and counters["buffer/admitted"] == counters["buffer/trained"] + dropped


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _wait(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--kinds", default="server,worker,learner,buffer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    rng = random.Random(arguments.seed)
    known = json.loads(RESULTS.read_text())["outcomes"] if RESULTS.exists() else []
    for kind in arguments.kinds.split(","):
        for _ in range(arguments.times):
            with tempfile.TemporaryDirectory() as folder:
                outcome = kill_once(arguments.config, kind, arguments.overrides, rng, Path(folder))
            print(outcome, flush=True)
            known.append({**asdict(outcome), "overrides": arguments.overrides})
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps({"machine": describe_machine(), "outcomes": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
