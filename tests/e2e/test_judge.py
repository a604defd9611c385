"""Runs whose answers a judge scores: a real SGLang server of the run that is killed, and an endpoint that goes away."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.judges import FakeJudge, score
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

REWARDS = 'task.rewards=[{"reward": "judge", "params": {"prompt": "{reference}|{answer}", "max_tokens": 40}}]'


@contextmanager
def serving(fake: FakeJudge, port: int = 0) -> Iterator[str]:
    """Serve in another thread while the block runs."""
    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with fake.serve(port) as url:
            urls.append(url)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_outage_of_the_endpoint_costs_waiting_and_no_zeros(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    run_dir, fake = tmp_path / "judged", FakeJudge(lambda body: score(len(body["messages"][0]["content"]) % 8 + 1))
    with serving(fake) as url:
        command = start(
            "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=judged", "run.steps=14", "rollout.engine=hf",
            "staleness.max=2", "eval.num_prompts=0", REWARDS, f"judge.urls=['{url}']",
        )
        wait_until(lambda: len(logged(run_dir)) > 3 or command.process.poll() is not None, 200, "three steps")
    time.sleep(8)  # the outage: only answers that have their verdicts are trained on
    steps = len(logged(run_dir))
    time.sleep(4)
    assert len(logged(run_dir)) == steps < 14 and command.process.poll() is None
    with serving(fake, int(url.split(":")[2].partition("/")[0])):
        assert command.wait(200) == 0
    records = [record for record in logged(run_dir) if "reward/mean" in record]
    assert len(records) == 14 and min(record["reward/judge"] for record in records) >= 0.1
    assert sum(record.get("scoring/judge/retries", 0) for record in records) > 0
    assert sum(record.get("scoring/judge/no_verdict", 0) + record.get("rollout/failed", 0) for record in records) == 0
    assert sum(record.get("scoring/judge/prompt_tokens", 0) for record in records) > 0


def judged_by_sglang(model_folder: Path, **changes: Any) -> list[str]:
    """Settings of a run whose judge is an untrained model on an SGLang server of the run.

    SGLang holds its replies to a form in which all of them are verdicts.

    Args:
        changes: other parameters of the reward.
    """
    params = {
        "prompt": "{reference}|{answer}", "max_tokens": 40, "temperature": 1.0, "structured": False,
        "body": {"regex": r'\{"score": [0-9]\}'}, **changes,
    }  # fmt: skip
    return [
        f"task.rewards={json.dumps([{'reward': 'judge', 'params': params}])}", f"judge.path={model_folder}",
        "placement.judge.servers=1", "judge.timeout_s=120", "rollout.engine=hf", "staleness.max=2",
        "eval.num_prompts=0",
    ]  # fmt: skip


def counted(records: list[dict[str, Any]]) -> dict[str, float]:
    """The sums of what scoring has counted, by name."""
    names = {key for record in records for key in record if key.startswith("scoring/judge/")}
    return {name.rpartition("/")[2]: sum(record.get(name) or 0.0 for record in records) for name in names}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_judge_on_a_server_of_the_run_scores_and_comes_back_when_it_is_killed(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand], model_folder: Path
) -> None:
    run_dir = tmp_path / "served"
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=served", "run.steps=100000",
        *judged_by_sglang(model_folder),
    )
    wait_until(lambda: len(logged(run_dir)) > 1 or command.process.poll() is not None, 500, "two steps")
    assert command.process.poll() is None, command.text()
    command.wait_for("ray::JudgeActor")[0].send_signal(signal.SIGKILL)
    wait_until(lambda: "judge/0 is back" in command.text(), 240, "the judge")
    steps = len(logged(run_dir))
    wait_until(lambda: len(logged(run_dir)) > steps + 2, 240, "more steps")
    command.interrupt()
    assert command.wait(120) == 130 and not command.orphans()
    records = [record for record in logged(run_dir) if "reward/mean" in record]
    assert all(0 <= record["reward/judge"] <= 0.9 for record in records)
    assert len({record["reward/judge"] for record in records}) > 1
    found = counted(records)
    assert found["completion_tokens"] > 0 and found["retries"] > 0, "while the judge was away"
    assert found["requests"] - found["retries"] >= 14 * (len(records) - 1), "each answer of a step has a verdict"
    assert [found.get(name, 0) for name in ("no_verdict", "unreadable", "unanswered")] == [0, 0, 0]
    status = json.loads((run_dir / "status.json").read_text())
    assert any("judges, as" in str(each) for each in status["processes"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_judge_on_a_server_of_the_run_is_held_to_the_json_schema_of_verdicts(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand], model_folder: Path
) -> None:
    """The schema leaves the length of the reason open, so that a reply may be cut off before its score."""
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=structured", "run.steps=3",
        *judged_by_sglang(model_folder, structured=True, body={}, max_tokens=600),
    )
    assert command.wait(700) == 0, command.text()[-3000:]
    found = counted([record for record in logged(tmp_path / "structured") if "reward/mean" in record])
    unreadable, requests = found.get("unreadable", 0), found["requests"] - found.get("retries", 0)
    assert requests >= 3 * 12
    # Without the schema an untrained model writes no JSON at all.
    assert unreadable < requests / 2, f"{unreadable:.0f} of {requests:.0f} replies have no verdict"
    assert [found.get(name, 0) for name in ("unanswered", "failed")] == [0, 0]
