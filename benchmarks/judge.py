"""Measures what a slow judge that fails costs a run on the CPU, against one without latency, and what an outage costs.

    python -m benchmarks.judge                                       # prints the table
    python -m benchmarks.judge --out benchmarks/results/judge

The runs train the quickstart's model, each answer scored by `judge` over HTTP. The judge is a process of its own, which
compares the answer with the right one after `--latency` seconds, and ends `--errors` of all requests by a 500, a 429 or
a broken connection instead. In the last run it is away for `--outage` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from rollout_server.engines.server_process import free_port

ROOT = Path(__file__).parents[1]
PROMPT = "{reference}\n{answer}"
SETTLED = 0.25
"""The share of a run's steps at its start that are not measured: the first groups come all at once."""


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
    rewards = json.dumps([{"reward": "judge", "params": {"prompt": PROMPT, "structured": False}}])
    command(
        folder, "train", f"run.name={name}", f"run.steps={steps}", f"task.rewards={rewards}",
        f"judge.urls=['http://127.0.0.1:{port}/v1']", "judge.concurrency=2048", "rollout.engine=hf",
        "staleness.max=24", "eval.size=0", "logging.wandb=disabled", "checkpoint.every_steps=0",
        "learner.decay_fraction=0", *overrides,
    )
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "reward/mean" in record]


def per_s(steps: list[dict[str, float]]) -> float:
    """Return the trained answers a second, once the run has settled."""
    settled = steps[int(len(steps) * SETTLED) :]
    times = [step["time/since_first_step_s"] for step in settled]
    return sum(step["batch/episodes"] for step in settled[1:]) / (times[-1] - times[0])


def total(steps: list[dict[str, float]], key: str) -> float:
    return sum(step.get(key) or 0.0 for step in steps)


def row(name: str, steps: list[dict[str, float]], fast_per_s: float) -> tuple[str, ...]:
    """Return the row of a run in the table."""
    counted = [f"{total(steps, key):.0f}" for key in (
        "scoring/judge/calls", "scoring/judge/retries", "scoring/judge/no_verdict", "rollout/failed")]  # fmt: skip
    longest_s = max(step.get("time/step_s") or 0.0 for step in steps)
    rate = per_s(steps)
    return (name, f"{rate:.0f}", f"{rate / fast_per_s:.2f}", *counted, f"{longest_s:.1f}")


def outage(folder: Path, port: int, steps: int, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train while the judge is stopped for the time of the outage, from a third of the steps on."""
    def interrupt() -> None:
        file = folder / "runs" / "outage" / "metrics.jsonl"
        while not file.exists() or len(file.read_text().splitlines()) < steps // 3:
            time.sleep(0.2)
        running.process.send_signal(signal.SIGKILL)
        time.sleep(arguments.outage)
        running.process = subprocess.Popen(running.process.args, cwd=ROOT)

    running: Any = argparse.Namespace()
    with judge_process(port, arguments.latency, arguments.errors) as running.process:
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            return train(folder, "outage", port, steps)
        finally:
            thread.join()
            running.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds")
    parser.add_argument("--errors", type=float, default=0.2, help="share of requests")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each of the first two rows, in turn")
    parser.add_argument("--serve", type=int, default=0, help="the port of the judge's own process")
    parser.add_argument("--out", type=Path, help="also write the table to this file, with .md and .json")
    arguments = parser.parse_args()
    if arguments.serve:
        app = endpoint(arguments.latency, arguments.errors)
        web.run_app(app, host="127.0.0.1", port=arguments.serve, print=None, access_log=None)
        return
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        fast, slow = [], []
        for number in range(arguments.rounds):
            with judge_process(port, 0.0, 0.0):
                fast.append(train(folder, f"fast-{number}", port, arguments.steps))
            with judge_process(port, arguments.latency, arguments.errors):
                slow.append(train(folder, f"slow-{number}", port, arguments.steps))
        fast_per_s = statistics.median(map(per_s, fast))
        slow_name = f"{arguments.latency:g} s, {100 * arguments.errors:g} % errors"
        rows = [row("no latency", each, fast_per_s) for each in fast]
        rows += [row(slow_name, each, fast_per_s) for each in slow]
        if arguments.outage:
            away = outage(folder, port, arguments.steps, arguments)
            rows.append(row(f"{slow_name}, away for {arguments.outage:g} s", away, fast_per_s))
    header = ("judge", "answers/s", "ratio", "verdicts", "retries", "no verdict", "groups lost", "longest step, s")
    table = Table(header, rows, "A slow judge that fails")
    page = f"{arguments.steps} steps a run. {machine_text()}.\n\n## {table.title}\n\n{table.markdown()}"
    if arguments.out:
        write_page(arguments.out, page, {"header": table.header, "rows": table.rows})
    else:
        print(page)


if __name__ == "__main__":
    main()
