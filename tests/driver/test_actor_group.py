"""Failures in processes of a run become errors that name the process: over real Ray actors."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.base.config import Config, Limit, NetworkConfig
from async_rl.base.errors import (
    ConfigError,
    ProcessDiedError,
    RewardError,
)
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import BufferActor, Origin
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import StopSignals
from benchmarks.marked_command import MarkedCommand
from tests.kit.configs import make_config
from tests.kit.fake_actors import FakeReservation

pytestmark = pytest.mark.e2e


def group_of(config: Config, folder: Path) -> ActorGroup:
    (folder / "r").mkdir(exist_ok=True)
    origin = Origin(str(folder), config)
    return ActorGroup(folder / "r", cast(Reservation, FakeReservation()), StopSignals(), origin)


@pytest.fixture
def group(tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorGroup]:
    monkeypatch.chdir(tmp_path)
    processes = group_of(make_config(run={"name": "r", "dir": tmp_path}), tmp_path)
    yield processes
    processes.stop(1.0)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def call(processes: ActorGroup, name: str, cls: type, *args: Any) -> Any:
    actor = processes.start(name, cls, *args, max_concurrency=4)
    return processes.gather({name: actor.start.remote()}, Limit(120.0, "timeouts.startup_s"), "the start")[name]


@pytest.mark.nightly
def test_a_buffer_that_can_not_be_opened_says_which_setting_of_network_is_wrong(
    ray_here: None, tmp_path: Path, taken_port: int
) -> None:
    (tmp_path / "broken").mkdir()
    for name in ("client.key", "server.key_secret"):
        (tmp_path / "broken" / name).touch(mode=0o600)
    for network, message in (
        (NetworkConfig(port=taken_port), rf"network\.port = {taken_port}"),
        (NetworkConfig(keys=str(tmp_path / "none")), r"network\.keys: .*none/client\.key"),
        (NetworkConfig(keys=str(tmp_path / "broken")), r"network\.keys: .*broken/client\.key"),
    ):
        processes = group_of(make_config(run={"name": "r", "dir": tmp_path}, network=network), tmp_path)
        with pytest.raises(ConfigError, match=message):
            call(processes, "buffer", BufferActor)
        processes.stop(1.0)


class Failing:
    def __init__(self, folder: str, error: Exception) -> None:
        self._error = error

    def start(self) -> None:
        raise self._error

    def stop(self) -> None: ...


def test_an_error_out_of_a_process_names_process_host_and_last_log_lines(group: ActorGroup, tmp_path: Path) -> None:
    logs = tmp_path / "r" / "logs"
    logs.mkdir(parents=True)
    error = RewardError(f"what went wrong\nlast lines of {logs}/sglang-rollout-0.log:\n    told")
    (logs / "rollout-0.log").write_text("of an earlier process\n")
    actor: Any = group.start("rollout/0", Failing, error)
    (logs / "rollout-0.log").write_text("of an earlier process\nlast words\n")
    (logs / "sglang-rollout-0.log").write_text("told already\n")
    with pytest.raises(RewardError) as caught:
        group.gather({"rollout/0": actor.start.remote()}, Limit(120.0, "timeouts.startup_s"), "the start")
    text = str(caught.value)
    assert text.startswith("what went wrong\n") and "told already" not in text and "an earlier process" not in text
    assert "rollout/0 on 10.0.0.9" in text and f"{logs}/rollout-0.log" in text and "last words" in text


def test_a_config_error_out_of_a_process_is_told_as_it_is(group: ActorGroup) -> None:
    with pytest.raises(ConfigError) as caught:
        call(group, "rollout/0", Failing, ConfigError("a.key must be 1, got 2"))
    assert str(caught.value) == "a.key must be 1, got 2"


class Slow:
    def __init__(self, folder: str) -> None: ...

    def start(self) -> None:
        time.sleep(60)

    def stop(self) -> None: ...


def test_a_stop_signal_ends_a_wait_of_start_up(group: ActorGroup) -> None:
    with StopSignals() as signals, signals.deferred():
        group.signals = signals
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call(group, "rollout/0", Slow)
        with pytest.raises(KeyboardInterrupt):  # a signal that came between two waits
            call(group, "rollout/1", Slow)


class Stillborn:
    def __init__(self, folder: str) -> None:
        raise OSError("no logs can be written here")

    def start(self) -> None: ...


def test_a_process_that_fails_as_it_is_made_is_named_with_what_it_raised(group: ActorGroup) -> None:
    with pytest.raises(ProcessDiedError, match=r"^learner/0 on 10\.0\.0\.9 ") as caught:
        call(group, "learner/0", Stillborn)
    assert "OSError: no logs can be written here" in str(caught.value)


MEMORY_KILL = """
import os, sys, ray
from pathlib import Path
from typing import cast
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.signals import StopSignals
from async_rl.base.config import Limit
from async_rl.base.errors import ProcessKilledError
from async_rl.run.processes.actors import Origin
from tests.kit.configs import make_config
from tests.kit.fake_actors import FakeReservation

class Idle:
    def __init__(self, folder): ...
    def start(self):
        import time
        time.sleep(60)
    def stop(self): ...

ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
group = ActorGroup(Path(sys.argv[1]), FakeReservation(), StopSignals(), Origin(".", make_config()))
try:
    group.gather({"buffer": group.start("buffer", Idle).start.remote()}, Limit(60.0, "timeouts.startup_s"), "the start")
except ProcessKilledError as error:
    print("killed:", error)
"""


@pytest.mark.nightly
def test_the_memory_monitor_of_ray_is_recognised_by_its_own_kill(tmp_path: Path) -> None:
    environment = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    command = MarkedCommand(
        ["-c", MEMORY_KILL, str(tmp_path)], tmp_path / "log", program=[sys.executable], environment=environment
    )
    try:
        command.wait(200)
    finally:
        command.kill()
    assert re.search(r"killed: buffer on 10\.0\.0\.9 .*\(\S+ used / \S+ limit; .+ GB\)", command.text()), command.text()


def test_a_buffer_that_takes_anothers_place_opens_at_its_port(group: ActorGroup) -> None:
    address = call(group, "buffer", BufferActor)
    group.kill("buffer")
    assert call(group, "buffer", BufferActor, int(address.rpartition(":")[2])) == address
