"""READ FIRST. The whole flow of a run.

                     admission: may I start a group?
            +-----------------------------------------------+
            v                                               |
    prompts --> rollout/i ------- Group ------> buffer ------- Batch ------> learner/r
                SGLang or hf      msgpack over ZMQ     slots, deadlines,            advantages, loss,
                engine, rewards                        the staleness bound          correction, FSDP2
                   ^                                                                   |
                   +------ weights of version v+1 (nccl | gloo | cuda_ipc | disk) -----+

    loop              where                                   consumes        waits for                unblocked by
    admit + generate  rollout_server/worker/worker.py         slots, prompts  a free slot              served(v)
    hand out          buffer/server.py                        groups          groups for a batch       put(group)
    train             learner/loop/learner.py                 a batch         the buffer's hand-out    its own push
    supervise         async_rl/run/processes/supervisor.py    reports         any process              a report, a crash

`run` checks the configuration. Then `train_once` starts every process, trains, and stops all processes. The modules in
async_rl/run/processes/ define the processes (actors.py), place them (placement.py, reservation.py), follow them
(supervisor.py), and start the servers (server_pool.py). Two more kinds of server are optional:

    eval/i     evaluation servers (placement.eval.servers). They answer held-out prompts with the weights to evaluate.
    judge/i    judge servers (placement.judge.servers). Rewards ask them to grade answers. They get no weights.

`staleness.max` sets how many slots the buffer grants ahead of the learner. 0 is strict synchrony; with 1..N, generation
and training overlap. No other code depends on it, with one exception: at 0, a server and the learner may take turns on
one GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from async_rl.base.config import Config, Limit
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.errors import (
    AsyncRLError,
    NothingToLearnError,
    ProcessDiedError,
    ProcessKilledError,
    WaitTimeoutError,
)
from async_rl.base.models_and_data.fetching import commits, located
from async_rl.base.models_and_data.hub_names import absolute_paths, hub_repos
from async_rl.base.run_dir.checkpoints import list_checkpoints
from async_rl.base.run_dir.files import write_whole
from async_rl.base.run_dir.free_space import full_disk_named
from async_rl.base.run_dir.run_dir import INTERRUPTED, asked_name, open_new_run_dir
from async_rl.base.telemetry.plots import plot_learning_curve
from async_rl.base.telemetry.status import INTERRUPTED_END, NORMAL_END
from async_rl.run.before_start.preflight import check_inputs, check_names
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.placement import decide_placement, runs_here, servers_per_gpu
from async_rl.run.processes.ray_start import open_ray, ray_messages_in
from async_rl.run.processes.reservation import Reservation, reserve
from async_rl.run.processes.signals import RunControl, StopSignals
from buffer.keys import client_keys_to_send, own_keys

if TYPE_CHECKING:
    from async_rl.base.messages.reports import EvaluationDone
    from async_rl.run.processes.actor_group import ActorGroup
    from async_rl.run.processes.supervisor import ReviveBuffer, UntilUp

LEAVES_WITHIN_S = 1.0
"""A server that failed because it leaves has no process any more after this time."""


def run(
    config: Config, signals: StopSignals | None = None,
    beside: Callable[[Path], AbstractContextManager[object]] = contextlib.nullcontext,
    control: RunControl | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train until step `config.run.steps`, and return the content of summary.json.

    With run.resume, the run continues from that checkpoint. After Ctrl-C or SIGTERM it ends with the current step and a
    checkpoint. After a second signal it ends immediately.

    Args:
        signals: handles Ctrl-C and SIGTERM; None: the run creates its own StopSignals.
        beside: called with the run directory. It returns a context manager, which is open during the run, for example
            to serve the page of `async-rl view`.
        control: reports steps to the caller, and lets the caller end the run early.

    Raises:
        ConfigError: a setting, file or input can't work.
        AsyncRLError: the run failed. Every process has been stopped.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when every process has been stopped. The message has the command
            that resumes the run.
    """
    if signals is None:
        with StopSignals() as signals:
            return run(config, signals, beside, control)
    with signals.deferred():
        check_names(config)
        decided = commits(config)
        signals.check()
        cautions = check_inputs(located(resolve(config, decided), check=signals.check))
        signals.check()
        control, resume = control or RunControl(), config.run.resume
        while True:
            decided = {**decided, "run.resume": resume, "watch.rollbacks": 0}
            if resume:
                from async_rl.base.run_dir.watch_events import rollbacks_of

                decided = {**decided, **rollbacks_of(resume)}
            summary = _run_once(config, decided, signals, cautions, beside, control)
            if "rolled_back" not in summary:
                break
            resume = summary["run_dir"]
    if "ended" in summary and summary["steps"] == 0:
        raise NothingToLearnError(f"the run has learned nothing, it ended without a step: {summary['ended']}")
    return summary


def _run_once(
    config: Config, decided: Decided, signals: StopSignals, cautions: Sequence[str],
    beside: Callable[[Path], AbstractContextManager[object]], control: RunControl,
) -> dict[str, Any]:  # fmt: skip
    """Train until the run ends or the watcher rolls it back, and return the content of summary.json.

    After a rollback the summary has the key `rolled_back`, and the caller resumes the run.

    Raises:
        AsyncRLError: the run failed. If a process died or a wait timed out, the message also says how to resume.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; the message says how to resume.
    """
    with open_run_dir(config, decided) as decided:
        run_dir = control.run_dir = resolve(config, decided).run_dir
        with full_disk_named(run_dir), beside(run_dir):
            try:
                summary = train_once(config, decided, signals, cautions, control)
                if signals.requested:
                    raise KeyboardInterrupt
                return summary
            except (ProcessDiedError, WaitTimeoutError) as error:
                if how := how_to_resume(run_dir):
                    raise type(error)(f"{error}\n{how}") from None
                raise
            except KeyboardInterrupt:
                raise KeyboardInterrupt(how_to_resume(run_dir)) from None


def open_run_dir(config: Config, decided: Decided) -> AbstractContextManager[Decided]:
    """Return a context manager that locks the directory of the run, and yields the decided settings.

    The directory of a new run is created. With run.resume the existing directory is used.
    """
    if resume := decided.get("run.resume", config.run.resume):
        from async_rl.base.run_dir.resuming import open_resumed_run_dir

        return open_resumed_run_dir(config, decided, resume)
    return open_new_run_dir(config, decided)


def how_to_resume(run_dir: Path) -> str:
    """Return the text "resume with: COMMAND", to end a message; "" if the run has no checkpoint yet."""
    return f"resume with: async-rl train --resume {run_dir}" if list_checkpoints(run_dir) else ""


def train_once(
    loaded: Config, decided: Decided, signals: StopSignals, cautions: Sequence[str], control: RunControl
) -> dict[str, Any]:
    """Train until the run ends, is interrupted or is rolled back, and return the content of summary.json.

    The caller must have locked the run's directory with `open_run_dir`.

    Args:
        loaded: the user's configuration. Every process gets it, together with the decided settings.
        decided: settings that the driver has decided so far. They replace the settings of `loaded`.
        cautions: the warnings of the checks before the start, for the log.
    """
    config = resolve(loaded, decided)
    run_dir = config.run_dir
    signals.is_heeded = False  # after a rollback, training begins again
    with (
        contextlib.closing(RunLog(config, control.on_step)) as log, own_keys(config, run_dir / "keys") as keys,
        open_ray(config), ray_messages_in(run_dir / "logs" / "ray.log"),
    ):  # fmt: skip
        signals.install()
        signals.check()
        name = asked_name(run_dir)
        why = f", as the name {name} is taken" if name not in ("", run_dir.name) else ""
        log.logger.note(f"run directory: {run_dir}{why}")
        for caution in cautions:
            log.logger.note(f"caution: {caution}")
        from async_rl.run.processes.actor_group import ActorGroup
        from async_rl.run.processes.actors import Origin
        from async_rl.run.processes.supervisor import Supervisor

        reservation = reserve(config, signals)
        log.logger.note(f"placed: {reservation}")
        paths = {} if runs_here(config) else absolute_paths(config)
        decided = {**decided, **keys, **decide_placement(config, reservation.parts), **paths}
        origin = Origin(os.getcwd(), loaded, decided, client_keys_to_send(config, keys))
        processes = ActorGroup(run_dir, reservation, signals, origin)
        shares_gpu = servers_per_gpu(reservation.parts) > 1  # servers start one after the other then
        supervisor = Supervisor(config, processes, log, control.servers, one_by_one=shares_gpu)
        try:
            buffer_address, master = start_processes(config, processes, log, reservation)
            revive = partial(revive_buffer, config, processes, log, buffer_address)

            async def start(until_up: UntilUp) -> None:
                await start_learner(config, processes, log, master, buffer_address, until_up)
                control.connect(processes.actors["learner/0"])  # before that, it would lose a request

            supervisor.train(buffer_address, revive, start, signals)
            servers = supervisor.end_restarts()
            if not signals.requested and not log.end_reason:
                evaluate_trained(config, processes, log, servers)
                supervisor.act(at_end=True)
            counters = close_buffer(config, processes, log, revive)
            interrupted = f"{INTERRUPTED_END}; {how_to_resume(run_dir)}".rstrip("; ")
            supervisor.watchdog.write_status(interrupted if signals.requested else NORMAL_END)
        except BaseException as error:
            supervisor.give_up(error)
            raise
        finally:
            control.disconnect()
            processes.stop(0 if signals.at_once else config.timeouts.shutdown_s)
        summary = log.summary(counters) | ({INTERRUPTED: True} if signals.requested else {})
        if supervisor.watch:
            supervisor.watch.complete(summary)
        if log.has_begun or not config.run.resume:  # else the resume is undone, and the summary stays as it was
            write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        if config.checkpoint.push_to_hub and "rolled_back" not in summary:
            from async_rl.base.models_and_data.hub import upload_model

            upload_model(config, run_dir / "model", log.logger.note)
    plot_learning_curve(run_dir)
    return summary


def start_processes(
    config: Config, processes: ActorGroup, log: RunLog, reservation: Reservation
) -> tuple[str, tuple[str, int]]:
    """Start the buffer, and the processes of the learner ranks without the learner in them.

    Returns:
        The buffer's address, and the address where the learner's ranks will meet.
    """
    from async_rl.run.processes.actors import BufferActor, LearnerActor, learner_threads

    limit, placement, engines = config.timeouts.limit("startup_s"), config.placement, ", ".join(config.engine_entries)
    ranks, apart = placement.learner.ranks, placement.eval.servers
    count = f"{placement.rollout.fewest} to {placement.rollout.most}" if placement.rollout.is_elastic else (
        str(placement.rollout.most)
    )
    servers = f"{count} rollout server(s) ({engines})"
    servers += f", {apart} evaluation server(s)" if apart else ""
    servers += f", {placement.judge.servers} judge server(s)" if placement.judge.servers else ""
    how_far = f"`async-rl status {config.run_dir}` tells how far"
    log.logger.note(f"starting buffer, {servers}, {ranks} learner rank(s); {how_far}")
    buffer = processes.start("buffer", BufferActor, max_concurrency=4)
    learners = {
        f"learner/{r}": processes.start(f"learner/{r}", LearnerActor, r, threads=learner_threads(config))
        for r in range(ranks)
    }
    if not runs_here(config):  # else check_inputs has found all here
        _find_files(config, processes, log, learners)
    # The buffer starts first, because that is quick and finds a mistake in `network` before a server loads its model.
    address = processes.gather({"buffer": buffer.start.remote()}, limit, "the start")["buffer"]
    if not runs_here(config):  # else check_inputs has asked this host
        for caution in check_ranks_memory(processes, list(learners), limit, reservation.gpus):
            log.logger.note(f"caution: {caution}")
    listening = processes.gather({"learner/0": learners["learner/0"].listen.remote()}, limit, "the address")
    return str(address), listening["learner/0"]


async def start_learner(
    config: Config, processes: ActorGroup, log: RunLog, master: tuple[str, int], buffer_address: str, until_up: UntilUp
) -> None:
    """Start the learner on all ranks, once enough servers have started, and have one evaluate the untrained model.

    Evaluation servers evaluate it during training instead.

    Args:
        master: the address where the ranks meet.
    """
    await until_up()
    limit = config.timeouts.limit("startup_s")
    names = [name for name in processes.actors if name.startswith("learner")]
    calls: dict[str, Any] = {name: processes.actors[name].start.remote(master, buffer_address) for name in names}
    await asyncio.gather(*(processes.call(name, call, limit, "the start") for name, call in calls.items()))
    if config.eval.num_prompts and not config.run.resume and not config.placement.eval.servers:
        log.add_eval(await _evaluate_untrained(config, processes, until_up))
    log.logger.note("all processes are up")


async def _evaluate_untrained(config: Config, processes: ActorGroup, until_up: UntilUp) -> EvaluationDone:
    """Have a rollout server evaluate version 0. If the server leaves meanwhile, another one does it."""
    limit, what = config.timeouts.limit("batch_s"), "the evaluation of version 0"
    while True:
        server = await until_up()
        start = processes.starts[server]
        try:
            done: EvaluationDone = await processes.call(server, _evaluation(processes, server, version=0), limit, what)
            return done
        except ProcessDiedError:
            await asyncio.sleep(LEAVES_WITHIN_S)
            if server in processes.actors and processes.starts[server] == start:  # it does not leave, but has died
                raise


def _find_files(config: Config, processes: ActorGroup, log: RunLog, learners: Mapping[str, Any]) -> None:
    """Have each host of the learner find the models, data and run.dir. Files on the hub are downloaded.

    Args:
        learners: the actors of all learner ranks, by process name.

    Raises:
        ConfigError: a host lacks a path, or can't download.
    """
    if repos := [repo.name for repo in hub_repos(config)]:
        log.logger.note(f"every host fetches {', '.join(repos)}, unless it has it: see its logs")
    with NamedTemporaryFile(dir=config.run_dir.absolute(), prefix=".shared-") as marker:
        finding = {name: each.find_files.remote(marker.name) for name, each in learners.items()}
        processes.gather(finding, config.timeouts.limit("batch_s"), "the models and data of its host")


def check_ranks_memory(processes: ActorGroup, learners: Sequence[str], limit: Limit, gpus: float) -> list[str]:
    """Check the GPU memory of the learner ranks of a run on a Ray cluster, and return warnings about it.

    Each process reports the GPU memory of its host. Without GPUs nothing is checked, and the list is empty.

    Args:
        learners: names of the learner ranks.
        limit: the time limit of each call.
        gpus: number of GPUs of all hosts together.

    Raises:
        ConfigError: torch finds no GPU on a host that has some, or a learner rank has too little memory.
    """
    asked: dict[str, Any] = {name: processes.actors[name].gpu_bytes.remote() for name in learners}
    if not (smallest := min(processes.gather(asked, limit, "the size of its GPUs").values())):
        return []
    checking: Any = processes.actors["learner/0"].check_memory.remote(smallest, gpus)
    return list(processes.gather({"learner/0": checking}, limit, "the memory of the run")["learner/0"])


def _evaluation(processes: ActorGroup, name: str, version: int) -> Any:
    """Have server `name` evaluate its weights, which are `version`, while nothing is trained. Returns the call."""
    actor: Any = processes.actors[name]
    return actor.evaluate.remote(version, beside_training=False)


def evaluate_trained(config: Config, processes: ActorGroup, log: RunLog, servers: list[str]) -> None:
    """Evaluate the trained model, and log the result.

    If the evaluation fails on one server, that server is killed and the next one evaluates. If it fails on all, or
    times out on one, the log says how to evaluate the saved model later.

    Args:
        servers: names of the rollout servers that work.
    """
    if config.eval.num_prompts == 0:
        return
    for name in servers:
        try:
            call, what = _evaluation(processes, name, log.version), f"the evaluation of version {log.version}"
            log.add_eval(processes.gather({name: call}, config.timeouts.limit("batch_s"), what)[name])
            return
        except AsyncRLError as error:
            log.logger.note(f"{name} did not evaluate version {log.version}: {str(error).splitlines()[0]}")
            processes.kill(name)
            if isinstance(error, WaitTimeoutError):  # another server would take as long
                break
    log.logger.note(
        f"version {log.version}, the trained model, is not evaluated: run `async-rl eval {config.run_dir / 'model'}`"
    )


async def revive_buffer(
    config: Config, processes: ActorGroup, log: RunLog, address: str, death: ProcessKilledError
) -> None:
    """Start a new buffer after a buffer's death, and wait until it runs.

    The new buffer continues from the journal, at the same address. Workers and the learner repeat an unanswered request
    for timeouts.buffer_s, which is long enough for a restart. If a new buffer is killed during its start, another one
    is started, unless timeouts.buffer_s have passed.

    Args:
        address: the address of the dead buffer.
        death: the error of its death.

    Raises:
        ProcessKilledError: `death` itself, if there is no journal. Otherwise the death of the last new buffer.
    """
    from async_rl.run.processes.actors import BufferActor

    if not config.buffer.journal:
        raise death
    began_s, port = time.monotonic(), int(address.rpartition(":")[2])
    while True:
        log.logger.note("the buffer's process died; another one goes on from its journal")
        buffer = processes.start("buffer", BufferActor, port, max_concurrency=4)
        try:
            await processes.call("buffer", buffer.start.remote(), config.timeouts.limit("startup_s"), "the restart")
            return
        except ProcessKilledError:
            if time.monotonic() - began_s > config.timeouts.buffer_s:
                raise


def close_buffer(
    config: Config, processes: ActorGroup, log: RunLog, revive: ReviveBuffer
) -> dict[str, float]:
    """Stop the rollout workers, then the buffer, and return the buffer's final counters. They include every group.

    A worker that fails to stop is killed.

    Args:
        revive: starts a new buffer if the buffer is killed before it has returned its counters.
    """
    workers: dict[str, Any] = {n: a.stop.remote() for n, a in processes.actors.items() if n.startswith("rollout")}
    for name, call in workers.items():
        try:
            processes.gather({name: call}, config.timeouts.limit("shutdown_s"), "the end")
        except AsyncRLError as error:
            log.logger.note(f"{name} did not end by itself: {str(error).splitlines()[0]}")
            processes.kill(name)
    try:
        return _final_counters(config, processes)
    except ProcessKilledError as error:
        asyncio.run(revive(error))
        return _final_counters(config, processes)


def _final_counters(config: Config, processes: ActorGroup) -> dict[str, float]:
    buffer, limit = processes.actors["buffer"], config.timeouts.limit("shutdown_s")
    processes.gather({"buffer": buffer.stop.remote()}, limit, "the end")
    counters = processes.gather({"buffer": buffer.close.remote()}, limit, "the final counters")
    return dict(counters["buffer"])
