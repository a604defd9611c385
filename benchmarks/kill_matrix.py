"""Kills a process or host of a run at a random moment, checks how the run recovers or ends, and tabulates the outcomes.

    python -m benchmarks.kill_matrix CONFIG --times 5 --kinds server,worker,silent,host,buffer,learner,driver ...

The committed rows are of configs/quickstart.yaml (with vllm: the tiny-qwen3 of docs/how-to/models.md) with
placement.rollout.servers=2, placement.learner.ranks=2, eval.num_prompts=0; other pushes than whole ones also with
weight_sync.bucket_bytes=65536, so that a push has many buckets.

kind     killed process                                           expected outcome
server   the process of SGLang or vLLM that holds the model       the run goes on, and the server is restarted
worker   a rollout process, with its engine                       the run goes on, and the process is restarted
silent   a rollout process, by SIGSTOP: it lives and does not     as for worker, after timeouts.silent_s (10 s here)
         answer
host     all processes of a host, without notice. It comes back   the run goes on with its other server meanwhile
         20 s later, or more
buffer   the buffer                                               the run goes on with a new buffer, from the journal
learner  a learner rank                                           the run ends with an error that names the rank
driver   `async-rl train` itself                                  every process ends

For the kind host the run is on two hosts (scripts/two_nodes_here.sh, needs root), each with one server.

Settings after the kinds are those of any run: with weight_sync.double_buffer=device, weight_sync.delta=true and
model.dtype=bfloat16 (with learner.lr=1e-5), or weight_sync.lora=adapter and model.lora.rank=4 other pushes are
disturbed. Each engine and each way to push has rows of its own.

All processes but `silent` are killed by SIGKILL. Every run has checkpoint.every_steps=2. Checked are the exit code,
that every admitted group is accounted for, that no token was older than the bound, and that no process is left (but for
a minute two helpers of Ray, if the driver is killed). A run that goes on is ended by Ctrl-C a few steps later; a run
that ended is continued with --resume.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config import WeightSyncConfig
from async_rl.base.config.loading import load_config
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.marked_command import MarkedCommand, wait_until
from benchmarks.page import write_page
from benchmarks.two_hosts import PLACED, TwoHosts

RESULTS = Path(__file__).parent / "results" / "kill_matrix"
VICTIMS = {
    "server": ("sglang::scheduler", "VLLM::EngineCore"), "worker": ("ray::RolloutActor",),
    "learner": ("ray::LearnerActor",), "silent": ("ray::RolloutActor",), "buffer": ("ray::BufferActor",),
}
"""Parts of the names of the processes, one of which is killed."""
KINDS = ("server", "worker", "silent", "host", "buffer", "learner", "driver")
AGAIN = "is back, with the weights"
BACK = {
    "server": AGAIN, "worker": AGAIN, "silent": AGAIN, "host": AGAIN, "buffer": "another one goes on from its journal",
}
SILENT_S = 10.0
AWAY_S = 20.0
"""How long a host stays away at least. Ray has found out by then."""
FATAL = ("learner", "driver")
START_TIMEOUT_S = 900.0
"""Two vLLM servers take five minutes to start beside two busy lanes of tests."""
BACK_TIMEOUT_S = 300.0
"""The time limit for a restart. An SGLang server takes a minute to start on a busy machine."""
END_TIMEOUT_S = 120.0
MORE_STEPS = 3


@dataclass(frozen=True, slots=True)
class KillResult:
    kind: str
    after_s: float
    """The seconds from the second logged step to the kill."""
    exit_code: int
    """The exit code of the run; 130 if it went on and Ctrl-C ended it."""
    recovered_s: float
    """The seconds from the kill until the new process serves the current version (server, worker, host), or until the
    second batch from the new buffer was trained, or from `--resume` until the next step was trained (learner, driver).
    """
    ended_s: float
    """The seconds from the kill until no process of the run was left but Ray's two helpers; 0 if the run went on."""
    error: str
    """The first line of the error with which the run ended."""
    names_all: bool
    """Whether the error gives the learner rank, its host and the last lines of its log."""
    counts_add_up: bool
    staleness_max: float
    orphans: int


def kill_once(config: str, kind: str, overrides: Sequence[str], rng: random.Random, folder: Path) -> KillResult:
    """Start a run, kill a process or a host, wait until the run goes on or was resumed, and return the outcome.

    A run survives the loss of a rollout server, a worker or the buffer; if it ends, the outcome has its exit code and
    error. After the loss of the learner or the driver it must end, and is resumed.

    Raises:
        WaitTimeoutError: the run does not start, has no process of this kind, or after the kill neither goes on nor
            ends.
        RuntimeError: the run ended before the kill. The message ends with its log.
    """
    run_dir = folder / kind
    arguments = ["train", config, f"run.dir={folder}", f"run.name={kind}", "run.steps=1000000", *overrides]
    arguments += ["checkpoint.every_steps=2", *([f"timeouts.silent_s={SILENT_S}"] if kind == "silent" else [])]
    log, hosts = folder / f"{kind}.log", None
    if kind == "host":
        hosts = TwoHosts(folder, load_config(config, overrides).placement.learner.ranks)
        command = hosts.start([*arguments, *PLACED, "placement.rollout.servers={min: 1, max: 2}"], log)
    else:
        command = MarkedCommand(arguments, log)
    again: MarkedCommand | None = None

    def is_over() -> bool:
        return command.process.poll() is not None

    try:
        wait_until(lambda: _steps(run_dir) > 2 or is_over(), START_TIMEOUT_S, "two steps")
        if hosts:
            hosts.come()
            wait_until(lambda: _servers(run_dir) == 2 or is_over(), START_TIMEOUT_S, "a push to the second host")
        after_s = rng.uniform(0.0, 6.0)
        time.sleep(after_s)
        if is_over():
            raise RuntimeError(f"the run ended before the kill:\n{command.text()[-3000:]}")
        if hosts:
            hosts.die()
        else:
            _kill_one(command, kind, rng)
        if kind in FATAL:
            code, ended_s, orphans = _wait_for_end(command)
            again = MarkedCommand(["train", "--resume", str(run_dir)], folder / f"{kind}-resumed.log")
            steps = _steps(run_dir)
            recovered_s = wait_until(lambda: _steps(run_dir) > steps, START_TIMEOUT_S, "the resumed run's first step")
            orphans += _stop(again, run_dir)[1]
        else:
            recovered_s, ended_s = _wait_for_recovery(command, kind, run_dir, hosts), 0.0
            code, orphans = _stop(command, run_dir)
        return _outcome(kind, after_s, code, recovered_s, ended_s, orphans, command.text(), run_dir)
    finally:
        for each in (command, again):
            if each:
                each.kill()


def _kill_one(command: MarkedCommand, kind: str, rng: random.Random) -> None:
    if kind == "driver":
        command.process.send_signal(signal.SIGKILL)
        return
    rng.choice(command.wait_for(*VICTIMS[kind])).send_signal(signal.SIGSTOP if kind == "silent" else signal.SIGKILL)


def _wait_for_recovery(command: MarkedCommand, kind: str, run_dir: Path, hosts: TwoHosts | None) -> float:
    def is_over() -> bool:
        return command.process.poll() is not None

    seconds = 0.0
    if hosts:
        enough = _steps(run_dir) + 2
        time.sleep(AWAY_S)
        seconds = AWAY_S + wait_until(lambda: _steps(run_dir) >= enough or is_over(), END_TIMEOUT_S, "two more steps")
        hosts.come()
    seconds += wait_until(lambda: BACK[kind] in command.text() or is_over(), BACK_TIMEOUT_S, f"the {kind} to come back")
    if kind == "buffer":  # the batch that is being trained came from the buffer that died
        before = _steps(run_dir)
        seconds += wait_until(lambda: _steps(run_dir) > before + 1 or is_over(), END_TIMEOUT_S, "two more steps")
    return seconds


def _wait_for_end(command: MarkedCommand) -> tuple[int, float, int]:
    """Wait for the run's end; return (exit code, seconds from now until no process is left, number still left)."""
    start_s = time.monotonic()
    code = command.wait(END_TIMEOUT_S)
    orphans = len(command.orphans())
    return code, time.monotonic() - start_s, orphans


def _stop(command: MarkedCommand, run_dir: Path) -> tuple[int, int]:
    """Wait for a few more steps, send Ctrl-C, and return (exit code, number of processes left)."""
    enough = _steps(run_dir) + MORE_STEPS
    wait_until(lambda: _steps(run_dir) >= enough or command.process.poll() is not None, END_TIMEOUT_S, "more steps")
    if command.process.poll() is None:
        command.interrupt()
    return command.wait(END_TIMEOUT_S), len(command.orphans())


def _outcome(
    kind: str, after_s: float, code: int, recovered_s: float, ended_s: float, orphans: int, text: str, run_dir: Path
) -> KillResult:
    _, _, error = text.partition("async-rl: error: ")
    summary: dict[str, Any] = {}
    if (run_dir / "summary.json").exists():
        summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return KillResult(
        kind=kind, after_s=round(after_s, 1), exit_code=code, recovered_s=round(recovered_s, 1),
        ended_s=round(ended_s, 1), error=error.partition("\n")[0],
        names_all=bool(re.match(r"learner/\d+ on \S+ died", error))
        and bool(re.search(r"\nlast lines of \S+learner-\d+\.log:\n +\S", text)),
        counts_add_up=adds_up(summary.get("buffer", {})),
        staleness_max=max((s["staleness/max"] for s in steps if "staleness/max" in s), default=0.0), orphans=orphans,
    )


def adds_up(counters: dict[str, float]) -> bool:
    """Return whether a run's final counts say that each admitted group was trained on or dropped."""
    reasons = [key for key in counters if key.startswith("buffer/dropped_") and key.count("/") == 1]
    dropped = sum(counters[key] for key in reasons)
    return bool(counters) and counters["buffer/admitted"] == counters["buffer/trained"] + dropped


def _steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _servers(run_dir: Path) -> int:
    """Return how many servers got the last push that is logged."""
    return (run_dir / "metrics.jsonl").read_text().splitlines()[-1].count('"version/rollout/')


def push_of(sync: WeightSyncConfig) -> str:
    """Return in words how weights are pushed: what travels, and by which transport if one is named."""
    what = "changes" if sync.delta else "adapters" if sync.lora == "adapter" else "whole"
    words = [what, *([f"staged ({sync.double_buffer})"] if sync.double_buffer != "none" else [])]
    return ", ".join([*words, *([sync.transport] if sync.transport != "auto" else [])])


def outcome_table(outcomes: Sequence[dict[str, Any]]) -> Table:
    header = (
        "killed", "engine", "push", "servers, ranks", "runs", "outcome", "recovered after, s", "ended after, s",
        "counts add up", "bound kept", "orphans", "load",
    )  # fmt: skip
    lines = []
    setups = dict.fromkeys((o["engine"], o["push"]) for o in outcomes)
    for kind, (engine, push) in itertools.product(KINDS, setups):
        rows = [o for o in outcomes if (o["kind"], o["engine"], o["push"]) == (kind, engine, push)]
        if rows:
            what = {"learner": "one error, then resumed", "driver": "all ends, then resumed"}.get(kind, "went on")
            expected = {"learner": 1, "driver": -signal.SIGKILL}.get(kind, 130)
            good = [o for o in rows if o["exit_code"] == expected and (kind != "learner" or o["names_all"])]
            cells = [
                kind, engine, push, rows[-1]["placement"], len(rows), f"{what}: {len(good)} of {len(rows)}",
                _range([o["recovered_s"] for o in good]),
                _range([o["ended_s"] for o in rows]) if kind in FATAL else "-",
                sum(o["counts_add_up"] for o in rows), sum(o["staleness_max"] <= o["bound"] for o in rows),
                sum(o["orphans"] for o in rows), _range([o["load"] for o in rows]),
            ]  # fmt: skip
            lines.append([str(cell) for cell in cells])
    return Table(header, lines)


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def report(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return the page of all outcomes: of this call of the program, and those that its file had before."""
    machine, commits = describe_machine(), dict.fromkeys(o["commit"] for o in outcomes)
    return f"""SIGKILL (silent: SIGSTOP) to one process of a run, or to all of a host, at a random moment.
The last rows: {machine["processor"]}, {machine["system"]}, {machine["cores"]} cores; commits {", ".join(commits)}.

{outcome_table(outcomes).markdown()}
Seconds are median (least to most). A server, worker or host has recovered when it serves the learner's current
version again, a buffer when the second batch after its return is trained on; learner and driver: from `--resume` to the
next step.
Ended: no process is left. Load: the machine's load average after the run, other programs' included.

```
{__doc__}```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    rng, known_file = random.Random(arguments.seed), arguments.out.with_name(f"{arguments.out.name}.json")
    outcomes = json.loads(known_file.read_text())["outcomes"] if known_file.exists() else []
    for kind in arguments.kinds.split(",") * arguments.times:
        folder = Path(tempfile.mkdtemp(prefix=f"kill-{kind}-"))
        outcome = kill_once(arguments.config, kind, arguments.overrides, rng, folder)
        if outcome.error and kind not in FATAL:
            print(f"the run ended: {outcome.error}\nits logs are in {folder}", flush=True)
        else:
            shutil.rmtree(folder)  # after an exception the logs stay as well
        outcomes.append(asdict(outcome) | {
            "engine": config.rollout.engine, "push": push_of(config.weight_sync), "bound": config.staleness.max,
            "load": round(os.getloadavg()[0], 1),
            "placement": f"{config.placement.rollout.most}, {config.placement.learner.ranks}",
            "commit": describe_machine()["commit"],
        })  # fmt: skip
        write_page(arguments.out, report(outcomes), {"machine": describe_machine(), "outcomes": outcomes})


if __name__ == "__main__":
    main()
