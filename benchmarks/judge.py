"""Measures what a slow judge that fails costs, against one without latency, and what an outage costs.

    python -m benchmarks.judge                                       # prints the tables
    python -m benchmarks.judge --steps 60 --rounds 2 --out benchmarks/results/judge algorithm.epochs=4

The judge is a process of its own, which compares an answer with the right one after `--latency` seconds, and ends
`--errors` of all requests by a 500, a 429 or a broken connection instead. In the last row it is away for `--outage`
seconds. The first table has a worker's scoring alone, which asks as fast as it can, so that the processor is its limit,
and requests that are repeated cost as much as others: `--at-once` answers at once of a judge that fails. A group of 8
answers waits for its slowest one, about 6 s with a latency of 2 s and a fifth of errors, so that so many seconds' worth
of answers must be under way. The runs of the second table train the quickstart's model on the CPU, with room for 6400
answers; `--steps 0` leaves them out. Four passes over each batch make the learner their limit, as with larger models.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from async_rl.base.config.loading import load_config
from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from rollout_server.engines.server_process import free_port
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.scoring import Scoring, open_rewards

ROOT = Path(__file__).parents[1]
PROMPT = "{reference}\n{answer}"
RIGHT, ANSWER, SHARE, GROUP = "abcde", "abxde", 0.8, 8
"""The right answer, one that is compared with it, the share of right letters, and the answers of a group."""
FAST_AT_ONCE = 256
"""The answers at once of the judge without latency and errors."""
STALENESS = 24
"""The bound of the runs."""
GROUPS_AT_ONCE = 800
"""The groups under way in a run: STALENESS + 1 batches of the quickstart's 32."""
START_S = 60.0
"""How long the judge's process may take to start."""
SETTLED = 0.25
"""The share of a run's steps at its start that are not measured: the first groups come all at once."""
PART = 5
"""The steps of a part of a run."""
LONGEST = 5.0
"""The time of a part, in median ones, above which it is left out of the rate: an outage, or a machine that stood still.
"""


def endpoint(latency_s: float, errors: float) -> web.Application:
    """Return a judge that finds an answer as good as the share of its letters that are right."""
    chance = random.Random(0)

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(latency_s)
        if chance.random() < errors:
            match chance.randrange(3):
                case 0:
                    return web.Response(status=500, text="oops")
                case 1:
                    return web.Response(status=429, text="slow down")
            if request.transport:
                request.transport.abort()
            return web.Response()
        right, _, answer = body["messages"][-1]["content"].partition("\n")
        score = 10 * sum(a == b for a, b in zip(right, answer.strip(), strict=False)) / max(1, len(right))
        reply = {"message": {"role": "assistant", "content": json.dumps({"score": score})}}
        return web.json_response({"choices": [reply], "usage": {"prompt_tokens": 10, "completion_tokens": 5}})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "letters"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    return app


@contextmanager
def judge_process(port: int, latency_s: float, errors: float) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the judge at this port of loopback in a process of its own."""
    arguments = ["--serve", str(port), "--latency", str(latency_s), "--errors", str(errors)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.judge", *arguments], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@dataclass(frozen=True, slots=True)
class Scored:
    """Answers that a judge was asked about."""

    per_s: float
    """The verdicts a second once the first answers are over."""
    counts: Mapping[str, float]
    """The metrics of the scoring."""
    wrong: int
    """The verdicts that are not what the judge says of such an answer, such as 0 for a failure."""
    longest_s: float
    """The longest time without a verdict."""


async def score_for(port: int, at_once: int, seconds: float, settling_s: float) -> Scored:
    """Have the reward `judge` score answers, so many at once, for some seconds after it has settled."""
    reward = {"reward": "judge", "params": {"prompt": PROMPT, "structured": False}}
    config = load_config(ROOT / "configs" / "quickstart.yaml", [
        f"task.rewards={json.dumps([reward])}", f"judge.urls=['http://127.0.0.1:{port}/v1']",
        f"judge.concurrency={at_once}", f"run.dir={ROOT / 'no-such-folder'}",  # so that no verdict is kept
    ])  # fmt: skip
    scoring = Scoring(config, open_rewards(config, None))  # type: ignore[arg-type]
    question, episode = Question(messages=(), ground_truth=RIGHT), Episode(rows=(), answer=ANSWER, end="done")
    began_s = time.monotonic()
    end_s = began_s + settling_s + seconds
    ends_s, wrong = [began_s], 0

    async def ask() -> None:
        nonlocal wrong
        while time.monotonic() < end_s:
            verdicts = await scoring.score(question, [episode] * GROUP)
            ends_s.append(time.monotonic())
            wrong += sum(verdict.reward not in (None, SHARE) for verdict in verdicts)

    try:
        await asyncio.gather(*(ask() for _ in range(at_once // GROUP)))
        counts = reduce_metrics(scoring.drain_metrics())
    finally:
        await scoring.aclose()
    settled = sum(end_s - seconds <= each < end_s for each in ends_s)
    longest_s = max(after - before for before, after in itertools.pairwise(ends_s))
    return Scored(settled * GROUP / seconds, counts, wrong, longest_s)


def scoring_table(arguments: argparse.Namespace) -> Table:
    """Return the table of the scoring alone."""
    latency_s, errors, at_once = arguments.latency, arguments.errors, arguments.at_once
    port, settling_s = free_port("127.0.0.1"), 3 * latency_s + 2 + at_once / 1000  # which all start together
    found: list[tuple[str, int, Scored]] = []
    name = f"{latency_s:g} s, {100 * errors:g} % errors"
    for row_name, number, judge_latency_s, judge_errors in (
        ("no latency", FAST_AT_ONCE, 0.0, 0.0), (f"no latency, {100 * errors:g} % errors", at_once, 0.0, errors),
        (name, at_once, latency_s, errors),
    ):  # fmt: skip
        with judge_process(port, judge_latency_s, judge_errors) as process:
            wait_for(port, process)
            found.append((row_name, number, asyncio.run(score_for(port, number, arguments.seconds, settling_s))))
    fast = found[0][2]
    if arguments.outage:
        with absent_after(port, settling_s, arguments) as process:
            wait_for(port, process)
            away = asyncio.run(score_for(port, at_once, arguments.outage + settling_s, settling_s))
        found.append((f"{name}, away for {arguments.outage:g} s", at_once, away))
    header = ("judge", "answers at once", "verdicts/s", "ratio", "verdicts", "retries", "no verdict", "wrong verdicts",
              "longest time without one, s")  # fmt: skip
    rows = [
        [name, str(number), f"{each.per_s:.0f}", f"{each.per_s / fast.per_s:.2f}",
         *(f"{each.counts.get(f'scoring/judge/{key}', 0):.0f}" for key in ("calls", "retries", "no_verdict")),
         str(each.wrong), f"{each.longest_s:.1f}"]
        for name, number, each in found
    ]  # fmt: skip
    return Table(header, rows, "Scoring alone")


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the judge's process listens."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"the judge's process does not listen at port {port}")


@contextmanager
def absent_after(port: int, seconds: float, arguments: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the judge, which is killed after some seconds and is back after the outage."""
    def interrupt() -> None:
        time.sleep(seconds)
        first.kill()
        time.sleep(arguments.outage)
        back.append(stack.enter_context(judge_process(port, arguments.latency, arguments.errors)))

    back: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        first = stack.enter_context(judge_process(port, arguments.latency, arguments.errors))
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield first
        finally:
            thread.join()


def make_model(folder: Path) -> None:
    """Make the model that all runs begin with."""
    command(folder, "sft", "sft.steps=150")


def command(folder: Path, what: str, *overrides: str) -> None:
    """Run `async-rl sft` or `train` with the quickstart's configuration in this folder."""
    words = [sys.executable, "-m", "async_rl.cli", what, str(ROOT / "configs" / "quickstart.yaml"), *overrides]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def train(folder: Path, name: str, port: int, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Train with the judge at this port; returns the records of the steps."""
    command(folder, "train", f"run.name={name}", f"run.steps={steps}", *settings(port), *overrides)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "reward/mean" in record]


def settings(port: int) -> list[str]:
    """Return the settings of a run with the judge at this port, with room for all answers that may be under way."""
    rewards = json.dumps([{"reward": "judge", "params": {"prompt": PROMPT, "structured": False}}])
    return [
        f"task.rewards={rewards}", f"judge.urls=['http://127.0.0.1:{port}/v1']",
        f"judge.concurrency={GROUPS_AT_ONCE * GROUP}", f"rollout.max_groups_in_flight={GROUPS_AT_ONCE}",
        f"staleness.max={STALENESS}", "rollout.engine=hf", "eval.num_prompts=0", "logging.wandb=disabled",
        "checkpoint.every_steps=0", "learner.lr_decay_fraction=0",
    ]  # fmt: skip


def per_s(steps: list[dict[str, float]]) -> tuple[float, int]:
    """Return the trained answers a second, once the run has settled, and the number of parts that are left out of it.
    """
    settled = steps[int(len(steps) * SETTLED) :]
    parts = [settled[first : first + PART + 1] for first in range(0, len(settled) - PART, PART)]
    seconds = [part[-1]["time/since_first_step_s"] - part[0]["time/since_first_step_s"] for part in parts]
    longest_s = LONGEST * statistics.median(seconds)
    kept = [
        (sum(step["batch/episodes"] for step in part[1:]), took_s)
        for part, took_s in zip(parts, seconds, strict=True) if took_s <= longest_s
    ]  # fmt: skip
    return sum(answers for answers, _ in kept) / sum(took_s for _, took_s in kept), len(parts) - len(kept)


def total(steps: list[dict[str, float]], key: str) -> float:
    return sum(step.get(key) or 0.0 for step in steps)


def row(name: str, steps: list[dict[str, float]], fast_per_s: float) -> tuple[str, ...]:
    """Return the row of a run in the table."""
    counted = [f"{total(steps, key):.0f}" for key in (
        "scoring/judge/calls", "scoring/judge/retries", "scoring/judge/no_verdict", "rollout/failed")]  # fmt: skip
    longest_s = max(step.get("time/step_s") or 0.0 for step in steps)
    rate, left_out = per_s(steps)
    parts = f"{left_out} of {(len(steps) - int(len(steps) * SETTLED) - 1) // PART}"
    return (name, f"{rate:.0f}", f"{rate / fast_per_s:.2f}", *counted, f"{longest_s:.1f}", parts)


def outage(folder: Path, port: int, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train while the judge is stopped for the time of the outage, from a third of the steps on."""
    def interrupt() -> None:
        file = folder / "runs" / "outage" / "metrics.jsonl"
        while not file.exists() or len(file.read_text().splitlines()) < arguments.steps // 3:
            time.sleep(0.2)
        running.process.send_signal(signal.SIGKILL)
        time.sleep(arguments.outage)
        running.process = subprocess.Popen(running.process.args, cwd=ROOT)

    running: Any = argparse.Namespace()
    with judge_process(port, arguments.latency, arguments.errors) as running.process:
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            return train(folder, "outage", port, arguments.steps, *arguments.overrides)
        finally:
            thread.join()
            running.process.kill()


def training_table(arguments: argparse.Namespace) -> Table:
    """Return the table of the runs."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        fast, slow = [], []
        for number in range(arguments.rounds):
            with judge_process(port, 0.0, 0.0):
                fast.append(train(folder, f"fast-{number}", port, arguments.steps, *arguments.overrides))
            with judge_process(port, arguments.latency, arguments.errors):
                slow.append(train(folder, f"slow-{number}", port, arguments.steps, *arguments.overrides))
        fast_per_s = statistics.median(per_s(each)[0] for each in fast)
        slow_name = f"{arguments.latency:g} s, {100 * arguments.errors:g} % errors"
        rows = [row("no latency", each, fast_per_s) for each in fast]
        rows += [row(slow_name, each, fast_per_s) for each in slow]
        if arguments.outage:
            away = outage(folder, port, arguments)
            rows.append(row(f"{slow_name}, away for {arguments.outage:g} s", away, fast_per_s))
    header = ("judge", "answers/s", "ratio", "verdicts", "retries", "no verdict", "groups lost", "longest step, s",
              "parts left out")  # fmt: skip
    return Table(header, rows, f"Training, {arguments.steps} steps a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds")
    parser.add_argument("--errors", type=float, default=0.2, help="share of requests")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds")
    parser.add_argument("--at-once", type=int, default=12288, help="answers at once of a judge that fails, alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of a row, scoring alone")
    parser.add_argument("--steps", type=int, default=80, help="of a run; 0: no runs")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each of the first two rows, in turn")
    parser.add_argument("--serve", type=int, default=0, help="the port of the judge's own process")
    parser.add_argument("--out", type=Path, help="also write the table to this file, with .md and .json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for all runs")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an answer has a connection, here and in all children
    if arguments.serve:
        app = endpoint(arguments.latency, arguments.errors)
        web.run_app(app, host="127.0.0.1", port=arguments.serve, print=None, access_log=None)
        return
    tables = [scoring_table(arguments), *([training_table(arguments)] if arguments.steps else [])]
    text = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    page = f"`python -m benchmarks.judge {' '.join(sys.argv[1:])}`, {machine_text()}.\n\n{text}"
    if arguments.out:
        numbers = [{"title": each.title, "header": each.header, "rows": each.rows} for each in tables]
        write_page(arguments.out, page, numbers)
    else:
        print(page)


if __name__ == "__main__":
    main()
