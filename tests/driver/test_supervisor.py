"""The supervisor over real Ray actors that do no work: deaths, silence, evaluations."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from async_rl.base.errors import ProcessDiedError, ProcessKilledError, WaitTimeoutError
from benchmarks.marked_command import wait_until
from tests.kit.fake_actors import Buffer, FakeRun, ends_when, stop, tells_when

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_here")]
StartRun = Callable[..., FakeRun]
BACK = "rollout/0 is back, with the weights of version 5"


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

    def revive(death: ProcessKilledError) -> None:
        deaths.append(death)
        if len(deaths) > 1:
            raise death
        ray.get(run.processes.start("buffer", Buffer, max_concurrency=4).status.remote(), timeout=60)
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
    run = start_run(colocated=True, batch_s=2, silent_s=4)
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
