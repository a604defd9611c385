"""The supervisor over real Ray actors that do no work: deaths, silence, evaluations."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from async_rl.base.config import Limit
from async_rl.base.errors import ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.base.telemetry.status import Status, format_status, write_status
from async_rl.pipeline import close_buffer, evaluate_trained
from benchmarks.marked_command import wait_until
from tests.kit.fake_actors import Buffer, FakeRun, Rollout, ends_when, stop, tells_when

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


@pytest.mark.nightly  # in CI: e2e/test_kills.py
def test_a_dropped_server_is_started_again_once_and_an_overdue_learner_ends_the_run(start_run: StartRun) -> None:
    run = start_run()
    run.tell("rollout-0-answers", "learner-0-drops a server")
    thread = tells_when(
        run, lambda: BACK in run.notes and (run.folder / "learner-0-has told its news").exists(), "learner-0-is overdue"
    )
    told = tells_when(run, lambda: BACK in run.notes, "learner-0-is late with news")
    with pytest.raises(WaitTimeoutError, match=r"^learner/0 on 10\.0\.0\.9 .* 19\d\d s on buffer, .* 1800 s") as caught:
        run.train()
    thread.join(5)
    assert "last words of learner-0" in str(caught.value)
    told.join(5)
    assert num_lost(run) == run.notes.count(BACK) == 1
    assert run.has_noted("(the network was cut)")
    assert run.happened("rollout/0 started", "connected", "abandoned", "learner/0 started") == [
        "rollout/0 started", "rollout/0 connected in start 1", "learner/0 started",
        "rollout/0 abandoned before start 2", "rollout/0 started", "rollout/0 connected in start 2",
    ]
    assert run.happened("of rollout/0") == [
        "learner adds start 1 of rollout/0 at http://rollout/0", "learner removes start 1 of rollout/0",
        "learner adds start 2 of rollout/0 at http://rollout/0",
    ]

    status = run.config.run_dir / "status.json"
    status.with_name("status.json.partial").unlink(missing_ok=True)
    status.with_name("status.json.partial").symlink_to("/dev/full")
    run.supervisor.give_up(caught.value)  # raises no second error


def test_a_dead_evaluation_server_costs_its_evaluation_and_two_deaths_the_run(start_run: StartRun) -> None:
    run = start_run(evals=1)
    run.tell("rollout-0-answers", "rollout-1-dies when asked")
    thread = tells_when(
        run, lambda: "eval/0 is back" in run.notes and run.log.version > 10,
        "learner-0-takes no step", "rollout-0-dies",
    )
    with pytest.raises(ProcessKilledError, match=r"2 times .*\(placement\.rollout\.max_"):
        run.train()
    thread.join(5)
    assert "version 3 is not evaluated: no evaluation server that serves it is up" in run.notes
    assert run.happened("eval/0 started", "eval/0 connected", "of eval/0", "abandoned")[:7] == [
        "eval/0 started", "eval/0 connected in start 1", "learner adds start 1 of eval/0 at http://eval/0",
        "learner removes start 1 of eval/0",
        "eval/0 started", "eval/0 connected in start 2", "learner adds start 2 of eval/0 at http://eval/0",
    ], "an evaluation server has no groups"
    assert (run.folder / "learner-0-was told of the end of an evaluation").exists()
    assert not (run.folder / "rollout-0-evaluates").exists()
    assert run.log.summary({})["skipped_evaluations"] == 1
    assert num_lost(run) == 2


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
    supervisor = run.train()
    thread.join(5)
    assert any("rollout/0 is lost, and started again: rollout/0 on 10.0.0.9 has given no sign" in n for n in run.notes)
    assert any("rollout/0: the prompts of its 3 running groups go to other servers" in note for note in run.notes)
    assert (run.folder / "rollout-1-evaluates").exists()
    assert (run.folder / "learner-0-was told of the end of an evaluation").exists()
    assert [(version, values["eval/accuracy"]) for version, values in run.log.results.evals] == [(3, 0.5)]

    supervisor.watchdog.write_status("running")
    line = next(line for line in format_status(run.config.run_dir).splitlines() if line.startswith("learner/0"))
    assert line.split()[:7] == ["learner/0", "10.0.0.9", "waits", "for", "a", "batch", "buffer"]
    assert line.split()[-2:] == ["1800", "s"]


@pytest.mark.nightly
def test_a_judge_that_dies_is_started_again_at_its_address(start_run: StartRun) -> None:
    run = start_run(judges=1)
    run.tell("rollout-0-answers", "judgeserver-0-dies")
    thread = ends_when(run, lambda: "judge/0 is back" in run.notes and run.log.version > 10)
    supervisor = run.train()
    thread.join(5)
    assert any(note.startswith("judge/0 is lost, and started again: judge/0 on 10.0.0.9 died") for note in run.notes)
    made = [line for line in run.happened() if line.startswith("judge")]
    assert made == ["judge/0 made at port 0", "judge/0 made at port 7"]
    assert run.happened("abandoned", "of judge/0") == []
    assert supervisor.end_restarts() == ["rollout/0"]


@pytest.mark.nightly
def test_a_learner_answers_status_while_every_server_waits_for_its_turn(start_run: StartRun) -> None:
    run = start_run(servers=9)
    learner: Any = run.processes.actors["learner/0"]
    run.tell("learner-0-has no turn to give")
    waiting = [learner.begin_start.remote(f"rollout/{index}") for index in range(9)]
    assert ray.wait(waiting, num_returns=1, timeout=1)[0] == []
    assert ray.get(learner.status.remote(), timeout=10).doing == "waits for a batch"
    run.untell("learner-0-has no turn to give")
    assert ray.get(waiting, timeout=10) == [None] * 9


@pytest.mark.nightly
def test_a_buffer_that_dies_while_a_server_is_restarted_is_replaced_and_asked_again(start_run: StartRun) -> None:
    run = start_run()
    run.tell("rollout-0-answers", "learner-0-drops a server", "buffer-0-dies when asked")
    deaths: list[ProcessKilledError] = []

    def revive(death: ProcessKilledError) -> None:
        deaths.append(death)
        ray.get(run.processes.start("buffer", Buffer, max_concurrency=4).status.remote(), timeout=60)

    thread = ends_when(run, lambda: BACK in run.notes)
    run.train(revive)
    thread.join(5)
    assert [str(death).startswith("buffer on 10.0.0.9 died") for death in deaths] == [True]
    assert run.happened("abandoned", "connected") == [
        "rollout/0 connected in start 1", "rollout/0 abandoned before start 2", "rollout/0 connected in start 2",
    ]


def kill(actor: Any) -> None:
    """Kill an actor, and wait until it is dead: `ray.kill` returns before that, and calls may still be answered."""
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.status.remote(), timeout=30)


@pytest.mark.nightly
def test_a_live_server_evaluates_the_trained_model_or_a_note_says_how_to(start_run: StartRun) -> None:
    run = start_run(servers=2, batch_s=3)
    run.tell("rollout-1-answers", "learner-0-ends")
    servers = run.train().end_restarts()
    assert servers == ["rollout/0", "rollout/1"]
    kill(run.processes.actors["rollout/0"])
    evaluate_trained(run.config, run.processes, run.log, servers)
    assert re.fullmatch(r"rollout/0 did not evaluate version \d+: rollout/0 on 10\.0\.0\.9 died .*", run.notes[-2])
    assert [(version, values["eval/accuracy"]) for version, values in run.log.results.evals] == [(run.log.version, 0.5)]

    run.tell("rollout-1-hangs when asked")
    evaluate_trained(run.config, run.processes, run.log, ["rollout/1"])
    assert "rollout/1 did not evaluate version" in run.notes[-2] and "waited 3 s" in run.notes[-2]
    assert run.notes[-1].endswith(f"is not evaluated: run `async-rl eval {run.config.run_dir / 'model'}`")
    assert run.processes.actors.keys() == {"buffer", "learner/0"}
    assert run.log.summary({})["accuracy_end"] == 0.5
    run.log.version += 1
    assert run.log.summary({})["accuracy_end"] is None, "it would be that of an earlier version"


@pytest.mark.nightly
def test_a_server_that_died_after_training_costs_no_summary(start_run: StartRun) -> None:
    run = start_run(servers=2)
    run.tell("learner-0-ends")
    run.train()
    kill(run.processes.actors["rollout/1"])
    counters = close_buffer(run.config, run.processes, run.log, lambda death: pytest.fail(str(death)))
    assert counters == {"buffer/unaccounted": 0}
    assert run.notes[-1].startswith("rollout/1 did not end by itself: rollout/1 on 10.0.0.9 died")


@pytest.mark.nightly
def test_status_shows_what_the_driver_waits_for_outside_training(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(servers=2)
    monkeypatch.setattr("async_rl.run.processes.actor_group.STATUS_INTERVAL_S", 0.1)
    of_one: list[str] = []

    def note(folder: Path, statuses: Sequence[Status], text: str) -> None:
        write_status(folder, statuses, text)
        words = format_status(folder).splitlines()[2].split()
        if "rollout/1" in words and "rollout/0," not in words:  # which has answered
            of_one.append(" ".join([words[0], *words[2:]]))
            run.tell("rollout-1-answers")

    monkeypatch.setattr("async_rl.run.processes.actor_group.write_status", note)
    run.tell("rollout-0-answers")
    servers = {name: run.processes.start(name, Rollout, index) for index, name in enumerate(run.config.server_names)}
    calls = {name: actor.evaluate.remote(7, beside_training=False) for name, actor in servers.items()}
    limit = Limit(60.0, "timeouts.generate_s")
    assert set(run.processes.gather(calls, limit, "the evaluation of version 7")) == set(calls)
    assert re.fullmatch(r"driver waits for the evaluation of version 7 rollout/1 \d+ s 60 s", of_one[0])
    asked: Any = run.processes.actors["buffer"].serve.remote()
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.shutdown_s.* buffer"):
        run.processes.gather({"buffer": asked}, Limit(0.25, "timeouts.shutdown_s"), "the end")


@pytest.mark.nightly
def test_ctrl_c_before_the_learner_has_started_ends_the_run_at_once(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    run.tell("learner-0-starts for long")

    def interrupts() -> bool:
        if "learner/0 started" not in run.happened():
            return False
        os.kill(os.getpid(), signal.SIGINT)
        return True

    with run.processes.signals, run.processes.signals.deferred():
        thread = tells_when(run, interrupts)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        thread.join(5)
    assert run.log.version == 0 and run.processes.signals.requested
    assert not [record for record in caplog.records if record.name == "asyncio"], "the user would see a stack trace"


def test_servers_join_drain_and_leave_while_steps_are_made(start_run: StartRun) -> None:
    run, both = start_run({"min": 1, "max": 2}, rollout={"max_restarts": 0}), ["rollout/0", "rollout/1"]
    run.reservation.without_host = {"rollout/1"}
    run.tell("rollout-0-answers", "rollout-1-answers")

    def change_servers() -> None:
        wait_until(lambda: run.log.version > 3, 60, "steps with one server")
        run.reservation.without_host.clear()
        wait_until(lambda: run.serving() == both, 60, "the second server")
        run.ask("remove", name="rollout/1")
        wait_until(lambda: len(run.happened("rollout/1 retired in start 1")) > 1, 60, "its drain")
        assert run.states()["rollout/1"] == "draining" and "rollout/1" in run.processes.actors
        run.tell("rollout-1-has no groups")
        wait_until(lambda: run.reservation.released == ["rollout/1"], 60, "its end")
        run.ask("max", number=2)
        wait_until(lambda: run.serving() == both, 60, "the second server again")
        run.reservation.left_s["rollout/0"] = 60.0
        wait_until(lambda: run.states()["rollout/0"] == "draining", 60, "the drain of a host that leaves")
        run.reservation.without_host = {"rollout/0"}  # else its next start may read that it dies, too
        run.tell("rollout-0-dies")  # with its host, before it has finished its groups: no death that counts
        wait_until(lambda: run.states()["rollout/0"] != "draining", 60, "the end of the host")
        run.reservation.left_s.clear()
        run.untell("rollout-0-dies")
        run.reservation.without_host = set()
        wait_until(lambda: run.serving() == both, 60, "the first server again")

    with ThreadPoolExecutor() as pool:
        changing = pool.submit(change_servers)
        thread = ends_when(run, changing.done)
        run.train()
        thread.join(5)
        changing.result()
    assert run.happened("abandoned") == ["rollout/1 abandoned before start 2", "rollout/0 abandoned before start 2"]
    adds = [event for event in run.happened("learner adds") if "of rollout/0" in event]
    assert [event[: len("learner adds start 1")] for event in adds] == ["learner adds start 1", "learner adds start 2"]
    assert run.happened("of rollout/1")[:3] == [
        "learner adds start 1 of rollout/1 at http://rollout/1", "learner removes start 1 of rollout/1",
        "learner removes start 1 of rollout/1",
    ], "when it begins to drain, and when it has ended"


@pytest.mark.nightly
def test_a_drain_goes_on_with_the_next_buffer(start_run: StartRun) -> None:
    run = start_run({"min": 1, "max": 2})
    run.tell("rollout-0-answers", "rollout-1-answers")

    def revive(death: ProcessKilledError) -> None:
        run.untell("buffer-0-dies")
        ray.get(run.processes.start("buffer", Buffer, max_concurrency=4).status.remote(), timeout=60)

    def remove_a_server() -> None:
        wait_until(lambda: run.serving() == ["rollout/0", "rollout/1"], 60, "two servers")
        run.ask("remove", name="rollout/1")
        wait_until(lambda: bool(run.happened("rollout/1 retired")), 60, "its drain")
        run.tell("buffer-0-dies")
        wait_until(lambda: run.processes.starts["buffer"] == 2, 60, "the next buffer")
        retired = len(run.happened("rollout/1 retired"))
        wait_until(lambda: len(run.happened("rollout/1 retired")) > retired + 1, 60, "the repeated retirement")
        run.tell("rollout-1-has no groups")
        wait_until(lambda: run.reservation.released == ["rollout/1"], 60, "its end")

    with ThreadPoolExecutor() as pool:
        removing = pool.submit(remove_a_server)
        thread = ends_when(run, removing.done)
        run.train(revive)
        thread.join(5)
        removing.result()
