"""Real Ray actors: failures in them become errors that name the process, and the supervisor sees death and silence."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from async_rl.base.config import Config, Limit
from async_rl.base.errors import ConfigError, ProcessDiedError, ProcessKilledError, RewardError, WaitTimeoutError
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import BufferActor, Origin
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import StopSignals
from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.configs import make_config
from tests.kit.fake_actors import Buffer, FakeReservation, FakeRun, ends_when, stop, tells_when

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_here")]
StartRun = Callable[..., FakeRun]
BACK = "rollout/0 is back, with the weights of version 5"


def group_of(config: Config, folder: Path) -> ActorGroup:
    (folder / "r").mkdir(exist_ok=True)
    origin = Origin(str(folder), config)
    return ActorGroup(folder / "r", cast(Reservation, FakeReservation()), StopSignals(), origin)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorGroup]:
    monkeypatch.chdir(tmp_path)
    processes = group_of(make_config(run={"name": "r", "dir": tmp_path}), tmp_path)
    yield processes
    processes.stop(1.0)


def call(processes: ActorGroup, name: str, cls: type, *args: Any) -> Any:
    actor = processes.start(name, cls, *args, max_concurrency=4)
    return processes.gather({name: actor.start.remote()}, Limit(120.0, "timeouts.startup_s"), "the start")[name]


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


def test_a_rank_that_dies_while_a_server_joins_is_named_and_not_its_peer_that_fails(start_run: StartRun) -> None:
    run = start_run(ranks=2)
    run.tell("rollout-0-answers", "learner-0-has no weights to give")
    thread = tells_when(run, lambda: run.states()["rollout/0"] == "filling", "learner-0-dies", "learner-1-fails")
    with pytest.raises(ProcessDiedError) as caught:
        run.train()
    thread.join(5)
    text = str(caught.value)
    assert text.startswith("learner/0 on 10.0.0.9 died") and "last words of learner-0" in text
    assert num_lost(run) == 0


def test_a_silent_buffer_is_killed_and_another_takes_its_place_as_long_as_one_can(start_run: StartRun) -> None:
    run = start_run(silent_s=2)
    run.tell("rollout-0-answers")
    deaths: list[ProcessKilledError] = []

    async def revive(death: ProcessKilledError) -> None:
        deaths.append(death)
        if len(deaths) > 1:
            raise death
        ray.get(run.processes.start("buffer", Buffer, max_concurrency=4).status.remote(), timeout=240)
        stop(run.processes.actors["buffer"])

    pids: list[int] = []

    def stop_the_first() -> bool:
        if run.log.version > 2:
            pids.append(stop(run.processes.actors["buffer"]))
        return bool(pids)

    thread = tells_when(run, stop_the_first)
    with pytest.raises(ProcessKilledError, match=r"^buffer on 10\.0\.0\.9 .*timeouts\.silent_s"):
        run.train(revive)
    thread.join(5)
    assert len(deaths) == 2
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists(), 60, "Ray to kill it")


def test_a_run_ends_once_a_buffer_that_died_at_its_end_is_back(start_run: StartRun) -> None:
    run = start_run()
    run.tell("rollout-0-answers")
    deaths: list[ProcessKilledError] = []

    async def revive(death: ProcessKilledError) -> None:
        deaths.append(death)
        (run.folder / "buffer-0-dies").unlink()
        run.tell("learner-0-ends")
        while "learner/0 ended" not in run.happened():
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)  # meanwhile the driver hears of that end
        run.processes.start("buffer", Buffer, max_concurrency=4)
        run.tell("buffer is back")

    thread = tells_when(run, lambda: run.log.version > 3, "buffer-0-dies")
    run.train(revive)
    thread.join(5)
    assert len(deaths) == 1 and (run.folder / "buffer is back").exists()


def test_a_learner_that_waits_beyond_its_limit_ends_the_run(start_run: StartRun) -> None:
    run = start_run()
    run.tell("rollout-0-answers")
    thread = tells_when(run, lambda: run.log.version > 2, "learner-0-is overdue")
    with pytest.raises(WaitTimeoutError, match=r"^learner/0 on 10\.0\.0\.9 .*buffer") as caught:
        run.train()
    thread.join(5)
    assert "last words of learner-0" in str(caught.value)

    status = run.config.run_dir / "status.json"
    status.with_name("status.json.partial").unlink(missing_ok=True)
    status.with_name("status.json.partial").symlink_to("/dev/full")
    run.supervisor.give_up(caught.value)  # raises no second error


def test_a_server_on_a_shared_gpu_starts_in_its_turn_and_must_get_weights(start_run: StartRun) -> None:
    run = start_run(colocated=True, batch_s=10, silent_s=10)
    run.tell("rollout-0-answers")
    drop = tells_when(run, lambda: run.log.version > 3, "learner-0-drops a server")

    def has_less_room_and_its_turn_has_ended() -> bool:
        is_told = run.has_noted("rollout/0 came back with room for 1000 tokens")
        return is_told and "the turn of rollout/0 ends" in run.happened()

    thread = tells_when(run, has_less_room_and_its_turn_has_ended, "learner-0-has no weights to give", "rollout-0-dies")
    with pytest.raises(WaitTimeoutError, match=r"^rollout/0 .*timeouts\.batch_s"):
        run.train()
    for each in (drop, thread):
        each.join(5)
    assert run.happened("rollout/0 started", "abandoned", "the turn")[:5] == [
        "rollout/0 started", "rollout/0 abandoned before start 2", "the turn of rollout/0", "rollout/0 started",
        "the turn of rollout/0 ends",
    ]
    assert num_lost(run) == 2


def num_lost(run: FakeRun) -> int:
    return len([note for note in run.notes if "is lost, and started again" in note])


def test_a_silent_server_is_replaced_and_its_evaluation_asked_of_another(start_run: StartRun) -> None:
    run = start_run(servers=2, silent_s=6)  # the one that takes its place must be up by then
    run.tell("rollout-1-answers")
    run.tell("rollout-0-hangs when asked")
    thread = ends_when(run, lambda: BACK in run.notes)
    run.train()
    thread.join(5)
    assert any("rollout/0 is lost, and started again: rollout/0 on 10.0.0.9 has given no sign" in n for n in run.notes)
    assert any("rollout/0: the prompts of its 3 running groups go to other servers" in note for note in run.notes)
    assert (run.folder / "rollout-1-evaluates").exists()
    assert (run.folder / "learner-0-was told of the end of an evaluation").exists()
    assert [(version, values["eval/accuracy"]) for version, values in run.log.results.evals] == [(3, 0.5)]


@pytest.mark.parametrize("in_a_step", [False, True])
def test_ctrl_c_gives_a_run_up_before_its_learner_starts_or_after_interrupt_s(
    in_a_step: bool, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interrupt_s=0.5 if in_a_step else 600)
    if not in_a_step:
        run.tell("learner-0-starts for long")

    def interrupts() -> bool:
        if run.log.version < 1 if in_a_step else "learner/0 started" not in run.happened():
            return False
        os.kill(os.getpid(), signal.SIGINT)
        return True

    with run.processes.signals, run.processes.signals.deferred():
        thread = tells_when(run, interrupts)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        thread.join(5)
    assert (run.log.version > 0) == in_a_step and run.processes.signals.requested
    assert not [record for record in caplog.records if record.name == "asyncio"], "the user would see a stack trace"
