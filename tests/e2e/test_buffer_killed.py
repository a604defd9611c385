"""A run survives SIGKILL to its buffer at random moments."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.marked_command import MarkedCommand, wait_until
from buffer.journal import FILE_NAME
from buffer.store_state import DROP_REASONS
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_outlives_its_buffer_and_trains_nothing_twice(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    kills, seconds, run_dir = 20, 240, tmp_path / "killed"
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=killed", "run.steps=1000000", "staleness.max=2",
        f"run.seconds={seconds}", "rollout.engine=sglang", "timeouts.buffer_s=20", "eval.num_prompts=0",
        "rollout.top_p=0.95",  # so groups have the ids that tokens were drawn from
    )
    wait_until(lambda: len(logged(run_dir)) > 2, 180, "two steps")
    rng = random.Random(kills)
    victims: list[int] = []
    while len(victims) < kills:
        time.sleep(rng.uniform(0.0, 2.0 * seconds / kills / 3))
        wait_until(lambda: new_buffer(command, victims) is not None, 60, "the next buffer")
        victim = new_buffer(command, victims)
        assert victim
        victim.send_signal(signal.SIGKILL)
        victims.append(victim.pid)
    assert command.wait(seconds + 120) == 0, command.log.read_text()[-3000:]

    counters = json.loads((run_dir / "summary.json").read_text())["buffer"]
    dropped = sum(counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS)
    assert command.log.read_text().count("another one goes on from its journal") == kills
    assert 0 < counters["buffer/restarts"] <= kills, "one that is killed before it has opened its journal counts none"
    assert counters["buffer/admitted"] == counters["buffer/trained"] + dropped
    with contextlib.closing(sqlite3.connect(run_dir / FILE_NAME)) as database:
        uses = database.execute("SELECT version, COUNT(*) FROM uses GROUP BY version ORDER BY version").fetchall()
        groups, distinct = database.execute("SELECT COUNT(group_id), COUNT(DISTINCT group_id) FROM uses").fetchone()
        worst = database.execute("SELECT MAX(staleness) FROM trained").fetchone()[0]
    assert uses == [(version, 4) for version in range(len(uses))], "each batch is whole, and trained once"
    assert groups == distinct == counters["buffer/trained"]
    assert worst <= 2
    learner_steps = [record["step"] for record in logged(run_dir)]
    assert learner_steps == list(range(1, len(uses) + 1))


def new_buffer(command: MarkedCommand, known: list[int]) -> psutil.Process | None:
    """The buffer's process, or None while the last one to be killed has no successor."""
    for process in command.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_buffer = "BufferActor" in " ".join([process.name(), *process.cmdline()])
            if is_buffer and process.pid not in known:
                return process
    return None
