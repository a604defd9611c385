"""Every `gpu` test and benchmark that fits a time, the most telling first; scripts/gpu_suite.sh is how it is called.

    python -m benchmarks.gpu_suite 25 OUT                  # in 25 minutes; results in OUT
    python -m benchmarks.gpu_suite 25 OUT --after RESULTS  # goes on where these results of another machine end
    python -m benchmarks.gpu_suite 25 OUT --list           # what would run; starts nothing

What succeeded is kept in runs/gpu-suite: the same command goes on with the rest. After every step OUT gets suite.json
(everything measured, what ran, what was left out and why), suite.log, plots and the sweep's cells. No process outlives
the call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_results import take_up, write_results
from benchmarks.gpu_steps import SERVER_ARGS, STEPS, Step

STATE = Path("runs/gpu-suite")
MARK = "ASYNC_RL_GPU_SUITE"
"""In the environment of every process of a call: they are found by it, whoever their parents are."""
GRACE_S = 15.0
RESERVE_S = 20.0
"""Of the given time, to write results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    step: str
    state: str
    """done | part | failed | timeout | skipped"""
    seconds: float = 0.0
    command: str = ""
    why: str = ""


class Suite:
    """
    Args:
        folder: keeps outcomes and results from call to call.
    """

    def __init__(self, steps: Sequence[Step], folder: Path, minutes: float) -> None:
        self.steps = steps
        self.folder = folder
        self.end_s = time.monotonic() + 60 * minutes - RESERVE_S
        self.mark = uuid.uuid4().hex
        self.outcomes: dict[str, Outcome] = {}
        if (file := folder / "outcomes.json").is_file():
            self.outcomes = {o["step"]: Outcome(**o) for o in json.loads(file.read_text())}

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            after_step: called after each that ran.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for step in self.steps:
            if self.is_done(step.name):
                print(f"{step.name}: done before", flush=True)
                continue
            if why := self.obstacle(step):
                self._keep(Outcome(step=step.name, state="skipped", why=why))
            else:
                self._keep(self._run(step))
                after_step()

    def obstacle(self, step: Step) -> str:
        """Why a step can't be begun; empty if it can."""
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
        """Those with which SGLang started."""
        return next((args for i, (args, _) in enumerate(SERVER_ARGS) if self.is_done(f"sglang-{i}")), {})

    def is_done(self, name: str) -> bool:
        if name == "server":
            return any(self.is_done(f"sglang-{number}") for number in range(len(SERVER_ARGS)))
        outcome = self.outcomes.get(name)
        lacks = any(step.name == name and step.product and not step.product.exists() for step in self.steps)
        return outcome is not None and outcome.state == "done" and not lacks

    def _run(self, step: Step) -> Outcome:
        limit_s = self.left_s() if step.stretches else min(self.left_s(), 180 * step.minutes)
        command = step.command(self.folder, self.server_args(), self.left_s() / 60)
        words = shlex.join(["python" if word == sys.executable else word for word in command])
        print(f"{step.name}: {words}", flush=True)
        environment = os.environ | {
            MARK: self.mark, "ASYNC_RL_GPU_RESULTS": str(self.folder), "PYTHONUNBUFFERED": "1",
            "ASYNC_RL_GPU_SERVER_ARGS": json.dumps(self.server_args()),
        }  # fmt: skip
        log_file = self.folder / f"{step.name}.log"
        start_s = time.monotonic()
        state = "timeout"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_s)
                    state = "failed" if code else "done" if step.is_whole() else "part"
            finally:
                end_marked(self.mark)
        tail = log_file.read_text(errors="replace").splitlines()[-8:]
        seconds = time.monotonic() - start_s
        print(f"{step.name}: {state} after {seconds:.0f} s" + "".join(f"\n    {line}" for line in tail), flush=True)
        why = "" if state in ("done", "part") else "\n".join(tail)
        return Outcome(step=step.name, state=state, seconds=seconds, command=words, why=why)

    def _keep(self, outcome: Outcome) -> None:
        if outcome.state == "skipped":
            print(f"{outcome.step}: skipped: {outcome.why}", flush=True)
        self.outcomes[outcome.step] = outcome
        text = json.dumps([asdict(kept) for kept in self.outcomes.values()], indent=1)
        (self.folder / "outcomes.json").write_text(text + "\n")


def _is_installed(need: str) -> bool:
    """A package, or a file of one, which is not imported for that."""
    package, _, file = need.partition("/")
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or []) if spec else []
    return spec is not None and (not file or any(list(Path(place).glob(f"{file}*")) for place in places))


def end_marked(mark: str) -> None:
    """End every process that carries the mark but this one: in order at first, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes = [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)]
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(processes, GRACE_S)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def plan(suite: Suite) -> str:
    """The steps that are not done yet, with the time at which each would end."""
    lines, spent = [], 0.0
    for step in suite.steps:
        if suite.is_done(step.name):
            lines.append(f"{step.name:14} done before")
            continue
        fits = (spent + step.minutes) * 60 <= suite.left_s()
        spent += step.minutes if fits else 0.0
        needs = f", needs {', '.join(step.needs)}" if step.needs else ""
        state = f"to minute {spent:.1f}" if fits else "no time left"
        lines.append(f"{step.name:14} {step.minutes:3g} min  {state}{needs}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path, nargs="?", default=Path(os.environ.get("OUT") or STATE / "out"))
    parser.add_argument("--after", type=Path, metavar="RESULTS", help="folder with suite.json, from another machine")
    parser.add_argument("--list", action="store_true", help="say what would run, and start nothing")
    arguments = parser.parse_args()
    if arguments.after and not (arguments.after / "suite.json").is_file():
        parser.error(f"--after must be a folder with suite.json, got {arguments.after}")
    if arguments.after and not (STATE / "outcomes.json").exists():  # else this machine's own are newer
        take_up(arguments.after, STATE)
    suite = Suite(STEPS, STATE, arguments.minutes)
    if arguments.list:
        print(plan(suite))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_suite: torch sees no GPU here; --list says what would run", file=sys.stderr)
        return 2

    def write() -> None:
        write_results(arguments.out, STATE, [asdict(outcome) for outcome in suite.outcomes.values()])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        suite.run(after_step=write)
    finally:
        end_marked(suite.mark)
        write()
        print(f"results in {arguments.out}", flush=True)
    return 1 if any(outcome.state in ("failed", "timeout") for outcome in suite.outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
