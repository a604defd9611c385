"""SIGKILL in mid-run: rollout servers and buffers are replaced; a learner or driver ends the run with one error."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kill_matrix import AGAIN, KillResult, adds_up, kill_once
from benchmarks.marked_command import MarkedCommand, wait_until
from benchmarks.two_hosts import why_not
from tests.kit.engines.killing_pushes import GLOO
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

def options(engine: str, seed: int) -> list[str]:
    """With an odd seed tokens come with the ids that they were drawn from."""
    return [
        "placement.rollout.servers=2", "placement.learner.ranks=2", "staleness.max=2", "eval.num_prompts=0",
        f"rollout.engine={engine}", f"rollout.top_p={0.95 if seed % 2 else 1}",
    ]


@pytest.mark.timeout(600)
def test_a_server_that_dies_between_two_pushes_or_within_one_is_replaced(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    params = {"between": 3, "within": 6, "log": str(tmp_path / "command-0.log")}
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=killed", "run.steps=1000000", "staleness.max=2",
        "eval.num_prompts=0", "rollout.engine=hf", "placement.rollout.servers=2", f"weight_sync.transport={GLOO}",
        f"weight_sync.params={json.dumps(params)}",
    )
    for times in (1, 2):
        wait_until(
            lambda times=times: command.text().count(AGAIN) == times or command.process.poll() is not None, 300,
            "the server to come back",
        )
    steps = len(logged(tmp_path / "killed"))
    wait_until(lambda: len(logged(tmp_path / "killed")) > steps + 2 or command.process.poll() is not None, 120, "steps")
    command.interrupt()
    assert command.wait(120) == 130, command.text()[-3000:]
    assert command.orphans() == []
    records = logged(tmp_path / "killed")
    assert sum(record.get("push/lost_servers", 0.0) for record in records) == 1, "that which died within a push"
    assert sum(record.get("push/repeats", 0.0) for record in records) == 0
    assert max(record["staleness/max"] for record in records) <= 2
    assert adds_up(json.loads((tmp_path / "killed" / "summary.json").read_text())["buffer"])


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "engine", "seed"),
    [
        ("worker", "sglang", 1), ("buffer", "hf", 2), ("server", "sglang", 3), ("silent", "hf", 1),
        ("learner", "hf", 1), ("driver", "sglang", 2), ("host", "hf", 2),
    ],
)
def test_lost_processes_come_back_or_end_the_run_and_every_group_is_counted(
    smoke_yaml: Path, tmp_path: Path, kind: str, engine: str, seed: int
) -> None:
    """Many seeds of each: python -m benchmarks.kill_matrix."""
    if kind == "host" and (reason := why_not()):
        pytest.skip(reason)
    check(kill_once(str(smoke_yaml), kind, options(engine, seed), random.Random(seed), tmp_path), tmp_path)


FORMS = {
    "adapter": ["weight_sync.lora=adapter", "model.lora.rank=4"],
    "delta": ["weight_sync.delta=true", "model.dtype=bfloat16", "learner.lr=1e-5"],
    "staged": ["weight_sync.double_buffer=device"],
}
"""The settings of pushes that are no whole weights, or that wait at the servers."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "engine", "form", "transport"),
    [
        ("server", "sglang", "delta", "gloo"), ("worker", "hf", "delta", "disk"),
        ("server", "sglang", "adapter", "disk"), ("learner", "hf", "adapter", "gloo"),
        ("server", "sglang", "staged", "auto"), ("learner", "hf", "staged", "auto"),
    ],
)
def test_a_process_that_dies_where_pushes_have_a_form_is_replaced_or_ends_the_run(
    smoke_yaml: Path, tmp_path: Path, kind: str, engine: str, form: str, transport: str
) -> None:
    """Only a push that the loss breaks is repeated whole: who has come back gets whole weights by itself."""
    pushes = [
        *options(engine, 1), *FORMS[form], f"weight_sync.transport={transport}", "weight_sync.bucket_bytes=65536",
        "task.reward=tests.e2e.test_old_kv:vowels",
    ]
    check(kill_once(str(smoke_yaml), kind, pushes, random.Random(1), tmp_path), tmp_path)
    if form == "delta":
        pushes_made = [record for record in logged(tmp_path / kind) if "push/changed_share" in record]
        whole = [record for record in pushes_made if record["push/changed_share"] == 1.0]
        assert all(record["push/lost_servers"] for record in whole), "one that has come back is filled by itself"
        assert len(whole) <= 1 and any(record.get("push/filled_servers") for record in pushes_made[1:])


def check(outcome: KillResult, folder: Path) -> None:
    """Check how a run in `folder` came through a kill: a lost learner or driver ends it, all else is replaced."""
    log = (folder / f"{outcome.kind}.log").read_text()
    assert outcome.exit_code == {"learner": 1, "driver": -signal.SIGKILL}.get(outcome.kind, 130), log[-3000:]
    if outcome.kind == "learner":
        assert outcome.names_all, outcome.error
        assert "Traceback" not in log
    else:
        assert outcome.error == ""
    assert outcome.ended_s < 60
    assert outcome.counts_add_up
    assert outcome.staleness_max <= 2
    assert outcome.orphans == 0
