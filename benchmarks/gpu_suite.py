"""Runs the `gpu` tests and benchmarks that fit a given time, the most informative first. See scripts/gpu_suite.sh.

    python -m benchmarks.gpu_suite 25 OUT           # takes at most 25 minutes; writes results into OUT
    python -m benchmarks.gpu_suite 25 OUT --list    # prints the steps that would run; starts nothing

Outcomes and results are kept in runs/gpu-suite, so the same command continues with the steps that have not succeeded.
After every step the results are written into OUT: suite.json (all measurements, which steps ran, which did not and
why), suite.log (the end of every log), and the sweep's plots and cells. No process outlives the call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.base.errors import WaitTimeoutError
from async_rl.tools.sweeps.machine import describe_machine
from benchmarks.gpu_steps import MPS_SWEEP, SERVER_ARGS, STEPS, SWEEP, SuiteStep
from benchmarks.marked_command import MarkedCommand

STATE = Path("runs/gpu-suite")
GRACE_S = 15.0
RESERVE_S = 20.0
"""The part of the given time that is kept for writing results."""
PLOTS = ("trade_off", "utilisation", "accuracy_by_time", "staleness")
CELL_FILES = ("cell.json", "config.yaml", "summary.json", "metrics.jsonl", "logs/*.log")
"""The files of a cell that are kept: those that a report needs and the logs, but no weights and answers."""
LOG_BYTES = 200_000
"""The number of bytes that are kept from the end of each log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: str
    state: str
    """`done`, `failed`, `timeout` or `skipped`."""
    seconds: float = 0.0
    command: str = ""
    why: str = ""


class Suite:
    """Runs the steps of the GPU suite one after the other within a time limit, and keeps their outcomes.

    Args:
        folder: the folder that keeps outcomes and results from call to call.
    """

    def __init__(self, steps: Sequence[SuiteStep], folder: Path, minutes: float) -> None:
        self.steps = steps
        self.folder = folder
        self.end_s = time.monotonic() + 60 * minutes - RESERVE_S
        self.outcomes: dict[str, StepResult] = {}
        if (file := folder / "outcomes.json").is_file():
            self.outcomes = {o["step"]: StepResult(**o) for o in json.loads(file.read_text())}

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Run each step that can start and has not succeeded, or that each call continues; then call `after_step`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for step in self.steps:
            if self.is_done(step.name) and not step.continues:
                print(f"{step.name}: done before", flush=True)
                continue
            if why := self.obstacle(step):
                print(f"{step.name}: skipped: {why}", flush=True)
                self._keep(StepResult(step=step.name, state="skipped", why=why))
            else:
                self._keep(self._run(step))
                after_step()

    def obstacle(self, step: SuiteStep) -> str:
        """Return the reason why a step can't start, or "" if it can."""
        if step.minutes * 60 > self.left_s():
            return f"needs {step.minutes:g} min, {max(0.0, self.left_s()) / 60:.1f} are left"
        if step.name.startswith("sglang-") and self.is_done("server"):
            return "SGLang runs already"
        names = {other.name for other in self.steps}
        for need in step.needs:
            if need in names or need == "server":
                if not self.is_done(need):
                    return f"needs {need}, which has not succeeded"
            elif not _is_installed(need):
                return f"needs {need}, which is not installed"
        return ""

    def server_args(self) -> dict[str, Any]:
        return next((args for i, (args, _) in enumerate(SERVER_ARGS) if self.is_done(f"sglang-{i}")), {})

    def is_done(self, name: str) -> bool:
        if name == "server":
            return any(self.is_done(f"sglang-{number}") for number in range(len(SERVER_ARGS)))
        return name in self.outcomes and self.outcomes[name].state == "done"

    def _run(self, step: SuiteStep) -> StepResult:
        limit_s = self.left_s() if step.continues else min(self.left_s(), 180 * step.minutes)
        command = step.command(self.folder, self.server_args(), self.left_s() / 60)
        words = shlex.join(["python" if word == sys.executable else word for word in command])
        print(f"{step.name}: {words}", flush=True)
        environment = {
            **os.environ, "ASYNC_RL_GPU_RESULTS": str(self.folder.absolute()), "PYTHONUNBUFFERED": "1",
            "ASYNC_RL_GPU_SERVER_ARGS": json.dumps(self.server_args()),
        }  # fmt: skip
        start_s = time.monotonic()
        state = "timeout"
        running = MarkedCommand(command, self.folder / f"{step.name}.log", program=(), environment=environment)
        try:
            with suppress(WaitTimeoutError):
                state = "failed" if running.wait(limit_s) else "done"
        finally:
            running.kill(GRACE_S)
        end = running.text().splitlines()[-8:]
        seconds = time.monotonic() - start_s
        print(f"{step.name}: {state} after {seconds:.0f} s" + "".join(f"\n    {line}" for line in end), flush=True)
        why = "" if state == "done" else "\n".join(end)
        return StepResult(step=step.name, state=state, seconds=seconds, command=words, why=why)

    def _keep(self, outcome: StepResult) -> None:
        self.outcomes[outcome.step] = outcome
        text = json.dumps([asdict(kept) for kept in self.outcomes.values()], indent=1)
        (self.folder / "outcomes.json").write_text(text + "\n")


def _is_installed(need: str) -> bool:
    """Return whether a package, package/start of a file's name, or `program NAME` is installed, without importing it.
    """
    if need.startswith("program "):
        return shutil.which(need.removeprefix("program ")) is not None
    package, _, file = need.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return spec is not None and (not file or any(list(Path(folder).glob(f"{file}*")) for folder in folders))


def write_results(out: Path, folder: Path, outcomes: list[dict[str, Any]]) -> None:
    """Write suite.json, suite.log, the sweep's plots and sweep-cells.tar.gz into `out`, at most seven files."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": describe_machine(), "steps": outcomes}
    for file in sorted(folder.glob("*.json")):
        if file.stem != "outcomes":
            with suppress(ValueError):  # the file is cut off if its step was ended while it wrote
                found[file.stem] = json.loads(file.read_text())
    for file in sorted(folder.glob("runs/*/summary.json")):
        found[file.parent.name] = json.loads(file.read_text())
    if (file := folder / "measured.jsonl").is_file():
        found["logprobs"] = [json.loads(line) for line in file.read_text().splitlines()]
    for title, sweep in (("sweep", SWEEP), ("sweep under MPS", MPS_SWEEP)):
        if (file := sweep / "table.md").is_file():
            found[title] = file.read_text()
    (out / "suite.json").write_text(json.dumps(found, indent=1) + "\n")
    with (out / "suite.log").open("wb") as log:
        for file in sorted(folder.rglob("*.log")):  # logs of the steps, and of the servers that they started
            if not file.resolve().is_relative_to(out.resolve()):
                name = file.relative_to(folder).with_suffix("")
                log.write(f"==== {name}\n".encode() + file.read_bytes()[-LOG_BYTES:] + b"\n")
    for plot in PLOTS:
        if (file := SWEEP / "plots" / f"{plot}.png").is_file():
            shutil.copy(file, out / f"sweep-{plot}.png")
    if (SWEEP / "cells").is_dir():
        with tarfile.open(out / "sweep-cells.tar.gz", "w:gz") as archive:
            for pattern in ("sweep.json", "logs/*.log", *(f"cells/*/{name}" for name in CELL_FILES)):
                for file in sorted(SWEEP.glob(pattern)):
                    archive.add(file, file.relative_to(SWEEP))


def plan(suite: Suite) -> str:
    """Return text with a line for each step: that it is done, the minute in which it would end, or no time left."""
    lines, spent = [], 0.0
    for step in suite.steps:
        fits = (spent + step.minutes) * 60 <= suite.left_s()
        if suite.is_done(step.name) and not step.continues:
            lines.append(f"{step.name:14} done before")
        elif fits:
            spent += step.minutes
            needs = ", ".join(step.needs) or "nothing"
            lines.append(f"{step.name:14} {step.minutes:3g} min  to minute {spent:.1f}, needs {needs}")
        else:
            lines.append(f"{step.name:14} {step.minutes:3g} min  no time left")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path, nargs="?", default=Path(os.environ.get("OUT") or STATE / "out"))
    parser.add_argument("--list", action="store_true", help="print what would run, and start nothing")
    arguments = parser.parse_args()
    suite = Suite(STEPS, STATE, arguments.minutes)
    if arguments.list:
        print(plan(suite))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_suite: torch finds no GPU on this machine; --list prints what would run", file=sys.stderr)
        return 2

    def write() -> None:
        write_results(arguments.out, STATE, [asdict(outcome) for outcome in suite.outcomes.values()])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        suite.run(after_step=write)
    finally:
        write()
        print(f"results in {arguments.out}", flush=True)
    return 1 if any(outcome.state in ("failed", "timeout") for outcome in suite.outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
