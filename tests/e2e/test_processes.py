"""Two runs on one host, one of which crashes, and strangers on the host of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
import zmq

from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.engines.strangers import status_of
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

Start = Callable[..., MarkedCommand]


@pytest.mark.nightly
def test_two_runs_of_one_name_share_a_host_and_one_may_crash(smoke_yaml: Path, tmp_path: Path, start: Start) -> None:
    """One run has a real SGLang server; the other must not touch its ports and child processes."""
    names = (str(smoke_yaml), f"run.dir={tmp_path}", "run.name=twin")
    long = start("train", *names, "rollout.engine=sglang", "run.steps=10000", "placement.rollout.max_restarts=0")
    short = start("train", *names, "rollout.engine=hf")
    assert short.wait(240) == 0, short.log.read_text()[-2000:]
    folders = {tmp_path / "twin", tmp_path / "twin-2"}
    ended = {folder for folder in folders if (folder / "summary.json").exists()}
    assert len(ended) == 1
    (going_on,) = folders - ended
    seen = max(len(logged(going_on)), 2)
    wait_until(lambda: len(logged(going_on)) > seen, 180, "a step after the other run has ended")
    assert_a_crash_ends_the_run(long, "sglang::scheduler", "rollout")


@pytest.mark.nightly
@pytest.mark.parametrize("insecure", [False, True])
def test_strangers_on_the_host_reach_neither_buffer_nor_engine(
    smoke_yaml: Path, tmp_path: Path, start: Start, insecure: bool
) -> None:
    ports = range(24_000, 24_400)
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=closed", "run.steps=10000", "rollout.engine=hf",
        f"network.insecure={str(insecure).lower()}", f"network.ports={ports[0]}-{ports[-1]}",
    )
    run_dir = tmp_path / "closed"
    wait_until(lambda: len(logged(run_dir)) > 2, 180, "two steps")
    engine, buffer, learner = (
        [port for port in ports_of(command.wait_for(words)[0]) if port in ports]  # the others are Ray's and gloo's
        for words in ("RolloutActor", "BufferActor", "LearnerActor")
    )
    assert [port - ports[0] < 266 for port in (*engine, *buffer, *learner)] == [False, True, True, True]
    paused = [port for port in engine if status_or_0(f"http://127.0.0.1:{port}/model_info") == 200]
    heard = [port for port in buffer if is_heard(port)]
    assert (len(paused), len(heard)) == (insecure, insecure)
    assert (run_dir / "keys").exists() != insecure
    assert "keys: ''" in (run_dir / "config.yaml").read_text()  # so that a resume makes new ones
    command.interrupt()
    assert command.wait(120) == 130
    assert not (run_dir / "keys").exists()


def ports_of(process: psutil.Process) -> list[int]:
    return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def status_or_0(url: str) -> int:
    """The status with which a GET is answered; 0 if what listens there speaks no HTTP."""
    try:
        return status_of("GET", url, {})
    except (OSError, HTTPException):
        return 0


def is_heard(port: int) -> bool:
    """Whether a client without keys gets any answer from the buffer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"anything")
        return bool(socket.poll(3000))


def assert_a_crash_ends_the_run(command: MarkedCommand, victim: str, expected: str) -> None:
    """Kill the process with `victim` in its name; the run ends with an error that names `expected`."""
    command.wait_for(victim)[0].send_signal(signal.SIGKILL)
    assert command.wait(60) == 1
    text = command.log.read_text()
    assert "async-rl: error:" in text
    assert expected in text.split("async-rl: error:")[1]
    assert "Traceback" not in text
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")
