"""Servers join, leave and die at chosen moments of runs; each run is audited, and the outcomes are tabulated.

    python -m benchmarks.elastic_matrix CONFIG --engine hf --situations group,push,... overrides ...
    python -m benchmarks.elastic_matrix CONFIG --engine hf --walk 1200 --seed 1 overrides ...

A run begins with one server and may have three (placement.rollout.servers: {min: 1, max: 3}). Each situation is a run
of its own, in which the events follow one another; the next event waits until the run has recovered.

    event         what happens
    join          `async-rl servers RUN max 3`, when there are two
    drain         `async-rl servers RUN remove NAME`
    remove --now  the same at once, with groups in flight
    kill worker   SIGKILL to the process of a worker; with hf its engine dies with it
    kill server   SIGKILL to SGLang's scheduler
    SIGSTOP       a worker hangs, and is found after timeouts.silent_s
    kill buffer   SIGKILL to the buffer
    kill driver   SIGKILL to `async-rl train`, then `--resume`
    SIGTERM to ray
                  a host leaves with notice and comes back. The run is on two hosts then (needs root), in a call of its
                  own: --events "SIGTERM to ray"

    situation     the moment of the events, or the settings of the run
    starting      2 s after a server has begun to start; it is the victim
    filling       when the engine of a server that joins is up; it is the victim
    group         groups are in flight
    push          in the middle of a push (a transport that waits for 2 s between two buckets)
    evaluation    a held-out evaluation runs all the time
    checkpoint    checkpoint.every_steps=1
    drain         weight_sync.on_update=drain
    exact         staleness.mode=exact
    staged        weight_sync.double_buffer=device
    delta         weight_sync.delta=true in bfloat16
    adapter       weight_sync.lora=adapter

The walk makes random events for so many seconds. The audit is benchmarks/run_audit.py. Each run has a row of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from async_rl.base.errors import AsyncRLError
from async_rl.base.seams import TransportEntry
from async_rl.base.weights.servers import Bucket
from async_rl.base.weights.transport import BroadcastTransport
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.marked_command import ASYNC_RL, MarkedCommand, wait_until
from benchmarks.page import machine_text, write_page
from benchmarks.run_audit import audit
from benchmarks.two_hosts import PLACED, TwoHosts

RESULTS = Path(__file__).parent / "results" / "elastic_matrix"
EVENTS = ("join", "drain", "remove --now", "kill worker", "kill server", "SIGSTOP", "kill buffer", "kill driver")
BY_HOST = "SIGTERM to ray"
"""The event of a run on two hosts."""
SITUATIONS: dict[str, list[str]] = {
    "group": [], "starting": [], "filling": ["algorithm.epochs=12"],
    "push": ["weight_sync.transport=benchmarks.elastic_matrix:SLOW_GLOO", "weight_sync.bucket_bytes=400000"],
    "evaluation": ["eval.num_prompts=256", "eval.samples_per_prompt=8", "eval.every_steps=1"],
    "checkpoint": ["checkpoint.every_steps=1", "checkpoint.keep_last=2"],
    "drain": ["weight_sync.on_update=drain"],
    "exact": ["weight_sync.on_update=drain", "staleness.mode=exact"],
    "staged": ["weight_sync.double_buffer=device"],
    "delta": ["weight_sync.delta=true", "model.dtype=bfloat16", "learner.lr=1e-5"],
    "adapter": ["weight_sync.lora=adapter", "model.lora.rank=4"],
}
IN_PUSH = "in_push"
"""The file in the run directory that is there while SLOW_GLOO waits in a push."""
PUSH_WAIT_S = 2.0
SILENT_S = 15.0
START_S, RECOVERY_S = 400.0, 300.0


class SlowTransport(BroadcastTransport):
    """Waits for PUSH_WAIT_S after the first bucket of a push, of every third version."""

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], object]:
        sent = super().start_sending(bucket, version)
        if version % 3 == 0 and not bucket.is_last and self._has_waited != version:
            self._has_waited = version
            sent()
            file = self.config.run_dir / IN_PUSH
            file.touch()
            time.sleep(PUSH_WAIT_S)
            file.unlink(missing_ok=True)
            return lambda: None
        return sent

    _has_waited = -1


SLOW_GLOO = TransportEntry(open=partial(SlowTransport, backend="gloo"), delivers="gloo", devices=("cpu",), stages=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    event: str
    recovered_s: float
    """Seconds from the event until the run had as many servers as wanted and had made two more steps. They are known to
    within the five seconds after which the status is written again."""
    problem: str
    """Why it did not recover; empty if it did."""


class DisturbedRun:
    """A run whose servers the program disturbs.

    Args:
        folder: the folder for the run and its logs.
        most: the most servers that the run may have.
        hosts: two hosts, the first one for the learner and one server. None: this machine is the only host.
    """

    def __init__(
        self, config: str, engine: str, situation: str, overrides: Sequence[str], folder: Path, most: int = 3,
        hosts: TwoHosts | None = None,
    ) -> None:
        self.folder, self.run_dir, self.engine, self.situation = folder, folder / "run", engine, situation
        self.hosts, self._starts = hosts, itertools.count()
        settings = [
            f"run.dir={folder}", "run.name=run", "run.steps=1000000", f"rollout.engine={engine}",
            f"placement.rollout.servers={{min: 1, max: {most}}}", f"timeouts.silent_s={SILENT_S}",
            "timeouts.startup_s=150", "eval.num_prompts=0", "checkpoint.every_steps=2",
            "buffer.journal_keep_steps=-1", "logging.wandb=disabled", *(PLACED if hosts else ()),
        ]
        self._start("train", config, *settings, *SITUATIONS[situation], *overrides)
        self.wait(lambda: self.steps() > 2, "two steps", START_S)
        if hosts:
            hosts.come()
        self.wanted = self.most = most
        self._wait_for_servers()

    def _start(self, *arguments: str) -> None:
        log = self.folder / f"log-{next(self._starts)}"
        self.command = self.hosts.start([*arguments], log) if self.hosts else MarkedCommand([*arguments], log)

    def wait(self, is_true: Callable[[], bool], what: str, limit_s: float = RECOVERY_S) -> float:
        def is_over() -> bool:
            return self.command.process.poll() is not None

        waited_s = wait_until(lambda: is_over() or is_true(), limit_s, what)
        if is_over():
            raise AsyncRLError(f"the run ended while it should have {what}: {self.command.text()[-600:]}")
        return waited_s

    def steps(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def servers(self) -> dict[str, str]:
        """Return {server: its state} by the run's status."""
        with suppress(OSError, ValueError, KeyError):
            saved = json.loads((self.run_dir / "status.json").read_text())
            return {each["name"]: each["state"] for each in saved["servers"]}
        return {}

    def ask(self, *words: str) -> None:
        subprocess.run([*ASYNC_RL, "servers", str(self.run_dir), *words], check=True, capture_output=True)

    def _wait_for_servers(self) -> float:
        return self.wait(
            lambda: [*self.servers().values()].count("serving") == self.wanted, f"{self.wanted} servers", RECOVERY_S
        )

    def recover(self) -> None:
        self._wait_for_servers()
        before = self.steps()
        self.wait(lambda: self.steps() > before + 1, "two more steps")

    def processes(self, title: str) -> list[psutil.Process]:
        return self.command.wait_for(title, timeout_s=30.0)

    def lines(self, text: str) -> int:
        return self.command.text().count(text)

    def reach(self) -> str:
        """Wait for the moment of the situation, and return the server that is the victim, or "" for any."""
        match self.situation:
            case "starting" | "filling":
                victim = f"rollout/{self.most - 1}"
                if self.wanted == self.most:
                    self.ask("remove", victim)
                    self.wanted -= 1
                    self._wait_for_servers()
                up, joins = self.lines("its engine is up"), self.lines(f"{victim} joins")
                self.ask("max", str(self.most))
                self.wanted = self.most
                self.wait(lambda: self.lines(f"{victim} joins") > joins, "a server that joins")
                if self.situation == "starting":
                    time.sleep(2.0)
                else:
                    self.wait(lambda: self.lines("its engine is up") > up, "its engine")
                return victim
            case "push":
                self.wait(lambda: (self.run_dir / IN_PUSH).exists(), "a push")
        return ""

    def kill(self, title: str, sign: signal.Signals, victim: str, rng: random.Random) -> None:
        found = self.processes(title)
        if victim:  # it is the youngest
            found = [max(found, key=lambda each: each.create_time())]
        rng.choice(found).send_signal(sign)

    def happen(self, event: str, rng: random.Random) -> float:
        """Make an event happen at the moment of the situation, and return the seconds until the run has recovered."""
        if event == "join" and self.wanted == self.most and self.situation not in ("starting", "filling"):
            self.ask("remove", "rollout/1")
            self.wanted -= 1
            self._wait_for_servers()
        victim, began_s = self.reach(), time.monotonic()
        noticed = {"drain": " is gone", "remove --now": " is gone", "kill buffer": "another one goes on"}
        word = noticed.get(event, " is lost") if event not in ("join", "kill driver") else ""
        before = self.lines(word) if word else 0
        match event:
            case "join":
                self.ask("max", str(self.most))
                self.wanted = self.most
            case "drain" | "remove --now":
                names = [victim] if victim else [n for n, state in self.servers().items() if state == "serving"]
                self.ask("remove", rng.choice(names), *(["--now"] if event == "remove --now" else []))
                self.wanted -= 1
            case "kill worker":
                self.kill("ray::RolloutActor", signal.SIGKILL, victim, rng)
            case "kill server":
                self.kill("sglang::scheduler", signal.SIGKILL, victim, rng)
            case "SIGSTOP":
                self.kill("ray::RolloutActor", signal.SIGSTOP, victim, rng)
            case "kill buffer":
                self.kill("ray::BufferActor", signal.SIGKILL, "", rng)
            case "kill driver":
                self.command.process.send_signal(signal.SIGKILL)
                self.command.wait(120)
                wait_until(lambda: not self.command.orphans(), 120, "the end of every process")
                self._start("train", "--resume", str(self.run_dir))
                self.wanted, steps = self.most, self.steps()
                self.wait(lambda: self.steps() > steps, "a step of the resumed run", START_S)
            case "SIGTERM to ray":
                assert self.hosts
                self.hosts.leave()
                self.wait(lambda: self.lines(word) > before, "noticed it")
                self.hosts.come()
        if word:
            self.wait(lambda: self.lines(word) > before, "noticed it")
        time.sleep(6.0)  # status.json is written every five seconds
        self.recover()
        seconds = time.monotonic() - began_s
        if self.wanted < self.most:
            self.ask("max", str(self.most))
            self.wanted = self.most
            self.recover()
        return seconds

    def end(self) -> dict[str, str]:
        """End the run by Ctrl-C, and return the audit."""
        self.command.interrupt()
        code, orphans = self.command.wait(120), self.command.orphans()
        found = audit(self.run_dir) if code == 130 else {"the run can be interrupted": f"exit code {code}"}
        return found | {"no process is left": str(orphans) if orphans else ""}


def walk(events: Sequence[str], seconds: float, rng: random.Random) -> Iterator[str]:
    """Yield random events for `seconds`."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield rng.choice(events)


def disturb(run: DisturbedRun, events: Iterable[str], rng: random.Random, outcomes: list[Outcome]) -> dict[str, str]:
    """Make the events happen in a run one after the other, add their outcomes, and return the audit of the run."""
    try:
        for event in events:
            problem, seconds = "", 0.0
            try:
                seconds = run.happen(event, rng)
            except (AsyncRLError, subprocess.CalledProcessError) as error:
                problem = str(error)
            outcomes.append(Outcome(event, round(seconds, 1), problem))
            print(outcomes[-1], flush=True)
            if problem:
                return {"every event is survived": f"{event}: {problem}"}
        return run.end()
    finally:
        run.command.kill()


def report(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of all runs, those of this call of the program and those that its file had before."""
    lines, commands = [], [*dict.fromkeys(run["command"] for run in runs)]
    tried = {outcome["event"] for run in runs for outcome in run["outcomes"]}
    events = [event for event in (*EVENTS, BY_HOST) if event in tried]
    for run in runs:
        cells = [run["engine"], run["situation"]]
        for event in events:
            found = [o for o in run["outcomes"] if o["event"] == event]
            cells.append(", ".join("FAILED" if o["problem"] else f"{o['recovered_s']:.0f}" for o in found) or "-")
        bad = sum(bool(problem) for problem in run["audit"].values())
        call = str(commands.index(run["command"]) + 1)
        lines.append([*cells, f"problems: {bad}" if bad else "clean", call, run["commit"], str(run["load"])])
    header = ("engine", "situation", *events, "audit", "call", "commit", "load")
    problems = [
        f"- {run['engine']}, {run['situation']}: {check}: {problem}"
        for run in runs for check, problem in run["audit"].items() if problem
    ]
    calls = "\n".join(f"{number}. `{command}`" for number, command in enumerate(commands, 1))
    return f"""Servers join, leave and die at chosen moments. {machine_text()}.

Seconds from the event until as many servers serve as wanted and two more steps are made; `-`: not tried. Load: the
machine's load average after the run, other programs' included.

{Table(header, lines).markdown()}
{chr(10).join([*problems, ""]) if problems else ""}
The calls:

{calls}

```
{__doc__}```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--situations", default=",".join(SITUATIONS))
    parser.add_argument("--events", default="")
    parser.add_argument("--walk", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    rng, known_file = random.Random(arguments.seed), arguments.out.with_name(f"{arguments.out.name}.json")
    runs = json.loads(known_file.read_text())["runs"] if known_file.exists() else []
    command = shlex.join(["python", "-m", "benchmarks.elastic_matrix", *sys.argv[1:]])
    possible = [each for each in EVENTS if each != "kill server" or arguments.engine == "sglang"]
    events = arguments.events.split(",") if arguments.events else possible
    for situation in ["walk"] if arguments.walk else arguments.situations.split(","):
        folder = Path(tempfile.mkdtemp(prefix=f"elastic-{situation}-"))
        hosts = TwoHosts(folder) if BY_HOST in events else None
        settings, commit = "group" if arguments.walk else situation, describe_machine()["commit"]
        outcomes: list[Outcome] = []
        run = DisturbedRun(arguments.config, arguments.engine, settings, arguments.overrides, folder, hosts=hosts)
        found = disturb(run, walk(events, arguments.walk, rng) if arguments.walk else events, rng, outcomes)
        print({check: problem for check, problem in found.items() if problem} or "audit: no problem", flush=True)
        if any(found.values()):
            print(f"logs: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        runs.append({
            "engine": arguments.engine, "situation": situation, "command": command, "commit": commit,
            "load": round(os.getloadavg()[0], 1), "outcomes": [asdict(each) for each in outcomes], "audit": found,
        })
        write_page(arguments.out, report(runs), {"machine": describe_machine(), "runs": runs})


if __name__ == "__main__":
    main()
