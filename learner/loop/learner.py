"""The learner's loop: take a batch, train on it, push the new version, release the slots of its groups."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.base.config import Config, RunConfig
from async_rl.base.messages.reports import LearnerReport, ServersFilled, ServersLost, StepDone, TrainingEnded
from async_rl.base.run_dir.checkpoints import RecentSteps, TrainingState, checkpoint_folder, lineage_of
from async_rl.base.telemetry.metrics import TIME, Metric, reduce_metrics
from async_rl.base.telemetry.nvml import GpuSampler
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Span, Timeline
from async_rl.base.types import Batch
from async_rl.base.weights.publisher import PushReport
from buffer.client import LearnerClient
from buffer.wire import decode_batch
from learner.loop.batches import NoBatch, ask_buffer, await_push, check_staleness, share_taken
from learner.loop.checkpointing import Checkpointer
from learner.loop.pushes import Evaluations, open_pushers
from learner.loop.ranks import DriverRequests, SharedGpus, init_distributed, start_limit
from learner.loop.updater import LogRatioRecorder, Updater
from learner.models.policy import due_folders, save_policy

PAUSE = "pause"
"""The name of the span of a learner that is paused."""
_WORDS = {"busy": "trains", "wait_weights": "waits for a server to start on its GPU"}
STEP_TIMES = {
    "batch": "time/wait_data_s", "update": "time/train_s", "push": "time/sync_s", "fill": "time/sync_s",
    "release memory": "time/sync_s", "drain": "time/drain_s", "held push": "time/held_by_eval_s",
    "eval push": "time/eval_push_s", PAUSE: "time/paused_s",
}
"""[name of a span] the metric that adds up the span's seconds. The last four metrics exist only if there was such a
span.
"""


class Learner:
    """One rank of the learner; `run` trains it. Only rank 0 talks to the buffer and to the rollout servers.

    Args:
        master_address, master_port: where rank 0 serves the rendezvous of all ranks.
        listener: rank 0's socket that listens at (master_address, master_port); None: it is opened here.

    Raises:
        ConfigError: the policy, critic, reference or reward model can't be loaded, or model.lora does not fit it.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_address: str, master_port: int, buffer_address: str,
        listener: socket.socket | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.version = 0
        device = init_distributed(config, rank, world_size, master_address, master_port, listener)
        self._updater = Updater(config, device)
        self._timeline = Timeline(f"learner/{rank}")
        self._gpus = GpuSampler(f"learner/{rank}")
        self._push_metrics: list[Metric] = []
        self._push_spans: list[Span] = []
        """Spans of the servers' pauses since the last report. `_push_metrics` has the metrics of the same pushes."""
        pushers = open_pushers(config, self._updater, rank)
        self.servers = {pool: pusher.members for pool, pusher in pushers.items()}
        """[pool] the servers to push to. The driver reports here on rank 0, from another thread, which servers join and
        which are lost.
        """
        self.shared_gpus = SharedGpus()
        self._client = LearnerClient(buffer_address, config.timeouts, config.network.keys) if rank == 0 else None
        self._weights = pushers["rollout"]
        self.evaluations = Evaluations(config, rank, self._timeline, pushers.get("eval"))
        self.requests = DriverRequests()
        self._checkpointer = Checkpointer(config, self._updater.optimizers, device)
        self._lineage = lineage_of(config.run_dir)
        self._recent_steps = RecentSteps(2 * config.timeouts.silent_s)
        self._saved_version = 0
        self._served_version = 0
        """The version that every live server serves."""
        self._no_batch: NoBatch | None = None
        """Why the run ends without another batch, the same on every rank; None while the run continues."""
        state = self._checkpointer.load(Path(config.run.resume)) if config.run.resume else None
        if state:
            self.version = self._saved_version = state.version
            self.evaluations.schedule.resume(state.version)
            self._updater.objective.restore(state.kl_coef)
        trains_own_rows = rank % config.learner.sequence_parallel == 0  # else another rank records the same rows
        records = config.buffer.journal and trains_own_rows
        self._log_ratios = LogRatioRecorder(config, rank, state) if records else None

    def stop(self) -> None:
        """Make `run` end after the current step, with a checkpoint. May be called from another thread."""
        self.requests.stop()
        self.evaluations.schedule.ended()

    def run(self) -> Iterator[LearnerReport]:
        """Train on the buffer's batches until the last step, a stop, or the end of the batches.

        Yields StepDone after each step, and the events that the driver must act on. At the end the policy is saved in
            run_dir/model; after `stop` there is only the checkpoint. If a resumed run has no step left, only its end is
            repeated.

        Raises:
            StalenessError: a batch breaks the bound; nothing of it was trained on.
            AsyncRLError: a wait timed out, a push failed, or losses or gradients stayed non-finite.
        """
        config = self.config
        if self.version < config.run.steps:  # every server gets this version, and admission opens for it
            yield from self._fill()
            self._release()
            yield from self.evaluations.make_due(self.version, None, self._weights.short_limit)
        else:
            self._no_batch = NoBatch("ended")
        is_last, start_s, first_step_end_s = False, time.monotonic(), 0.0
        while not is_last:
            # take: the next batch, or why there is none
            taken = self._take()
            if isinstance(taken, NoBatch):
                if taken.why == "servers wait":
                    filled = self._fill()
                    if self.version > self._served_version:
                        reports = yield from self._publish(None, is_last=False)
                        yield from reports
                    yield from filled
                elif taken.why == "checkpoint wanted":
                    self._checkpoint_on_request()
                elif taken.why == "paused":
                    self._wait_paused()
                else:
                    yield from self._end_early(taken)
                    break
                continue
            if config.shares_gpus:
                self._release_server_memory()

            # check and update: one batch makes one new version
            with self._timeline.span("busy", "update"):
                batch, metrics = check_staleness(taken, self.version, config.staleness)
                metrics += self._updater.update(batch, self._log_ratios)
            self.version += 1
            if self._log_ratios:
                self._log_ratios.write(batch, self.version)
            self._checkpointer.check()  # a failed write ends the run now, not when the next checkpoint is due
            if self._client:
                self._client.trained(self.version)
            now_s = time.monotonic()
            first_step_end_s = first_step_end_s or now_s  # run.seconds count from the end of the first step
            is_last = self.version >= config.run.steps or _is_over(config.run, now_s - first_step_end_s)

            # push, and begin the evaluation that is due
            events: list[LearnerReport] = []
            if is_last or self.version % config.weight_sync.every_steps == 0:
                events = yield from self._publish(taken, is_last)
            self.shared_gpus.end_step()

            # checkpoint
            if config.checkpoint.every_steps and (is_last or self.version % config.checkpoint.every_steps == 0):
                self._keep_for_checkpoint(metrics, time.monotonic() - start_s)
                metrics += self._checkpoint()
            step_s = time.monotonic() - start_s
            self._save(is_last=is_last)

            # report
            yield self._step_report(metrics, step_s)
            yield from events
            start_s = time.monotonic()
        self._close()

    def _take(self) -> Batch | NoBatch:
        """Wait for the next batch and return it, or a NoBatch that says why there is none, the same on every rank.

        `stop` ends the wait. So does a server that has joined and needs weights: the batch may be waiting for this
        server's groups. After timeouts.batch_s rank 0 raises WaitTimeoutError.
        """
        if self._no_batch:
            return self._no_batch
        taken = None
        with self._timeline.span("wait_data", "batch"):
            if self._client:
                waits = self._weights.members.someone_waits
                taken = ask_buffer(self._client, self.version, self.requests.why_no_batch, waits)
            taken = share_taken(taken)
        return taken if isinstance(taken, NoBatch) else decode_batch(taken)

    def _release_server_memory(self) -> None:
        """Wait for an evaluation that holds pushes, then make the servers free their GPU memory until the next push."""
        self.evaluations.await_end(self.version + 1)
        self._await_starts()
        with self._timeline.span("sync", "release memory"):
            if self.rank == 0:
                self._weights.release_server_memory()
            dist.barrier()

    def _await_starts(self) -> None:
        """Wait until no server starts on the learner's GPUs. None begins to before `shared_gpus.end_step`. Collective.
        """
        with self._timeline.span("wait_weights", "server start"):
            self.shared_gpus.begin_step(start_limit(self.config.timeouts))
            dist.barrier()

    def _publish(self, batch: Batch | None, is_last: bool) -> Generator[LearnerReport, None, list[LearnerReport]]:
        """Push the current version, which is new, to every server. Open admission for it and begin due evaluations.

        The push first waits for an evaluation that holds pushes, and with on_update drain for running groups. If the
        run ends during that wait, nothing is pushed, and `_take` returns the reason.

        Yields reports of lost servers before groups may start with the version: a lost server that still lives would
        sample them from older weights. Returns the other reports for the driver.

        Args:
            batch: the step's batch. None: an extra push, without a step, as a server that has joined has the version.
            is_last: the push follows the last step, so admission stays closed.
        """
        self.evaluations.await_end(self.version)
        if self.config.weight_sync.on_update == "drain" and not is_last:
            with self._timeline.span("wait_data", "drain"):  # no group may start, until none runs any more
                self._no_batch = await_push(self._client, self.version, self.requests.why_no_batch)
            if self._no_batch:
                return []
        yield from self._push(batch, is_last=is_last)
        if is_last:  # no group may start any more
            return []
        self._release()
        filled = self._fill() if self._weights.someone_waits() else self._weights.take_filled(self.version)
        return [*filled, *self.evaluations.make_due(self.version, batch, self._weights.short_limit)]

    def _fill(self) -> list[ServersLost | ServersFilled]:
        """Push the weights to the servers that have joined, and return reports of them for the driver. Collective."""
        if self.config.shares_gpus:  # gathered weights would take memory from a server that starts there
            self._await_starts()
        with self._timeline.span("sync", "fill"):
            report, events = self._weights.fill(self.version)
        self.shared_gpus.end_step()
        self._push_spans += report.spans
        if counted := [event for event in events if isinstance(event, ServersFilled)]:
            self._push_metrics += [
                Metric("push/fill_s", report.seconds, "sum", unit="s"),
                Metric("push/filled_servers", float(len(counted[0].servers)), "sum"),
            ]
        self._push_metrics += _counts(report, events)
        return events

    def _push(self, batch: Batch | None = None, *, is_last: bool = False) -> list[LearnerReport]:
        """Push the weights to every live server, verified with a row of `batch` if that is due. Returns lost servers.

        With `is_last` the average weights of learner.ema_decay are pushed: the run's result, which is evaluated and
        saved. The buffer stores no group with tokens of it, which a longer run would take for those of this version.
        """
        if is_last and self._client and self.config.learner.ema_decay:
            self._client.ended(self.version)
        with self._timeline.span("sync", "push"), self._updater.averaged() if is_last else nullcontext():
            report, lost = self._weights.push(self.version, batch)
        self._push_spans += report.spans
        self._push_metrics += [
            Metric("time/push_s", report.seconds, unit="s"),
            Metric("push/bytes", float(report.num_bytes), "sum", unit="bytes"),
            Metric("push/pause_s", report.pause_s, unit="s"),
            *(Metric(f"version/{name}", float(self.version), "last") for name in self._weights.servers),
            *_counts(report, lost),
        ]
        if self.config.weight_sync.delta:
            self._push_metrics.append(Metric("push/changed_share", report.changed_share, unit="share"))
        return [*lost]

    def _release(self) -> None:
        """Tell the buffer that every server serves the current version, which frees the slots of trained groups."""
        self._served_version = self.version
        if self._client:
            self._client.served(self.version)

    def _step_report(self, metrics: list[Metric], step_s: float) -> StepDone:
        measured, spans = self._measured()
        report = StepDone(version=self.version, spans=spans, samples=self._gpus.drain())
        if self.rank > 0:
            return report
        metrics = [*metrics, *measured, Metric(TIME, step_s, unit="s"), *step_times(spans)]
        self._recent_steps.add(self.version, reduce_metrics(metrics))
        report = replace(report, metrics=tuple(metrics))
        if self.config.logging.wandb == "disabled":
            return report
        from async_rl.base.telemetry.examples import choose_examples

        return replace(report, examples=choose_examples(self._updater.trained))

    def _keep_for_checkpoint(self, metrics: list[Metric], step_s: float) -> None:
        """Add the metrics of this step to those in its checkpoint. The step is reported only after the checkpoint."""
        if self.rank == 0:
            self._push_spans[:0] = self._timeline.drain()
            times = [Metric(TIME, step_s, unit="s"), *step_times(self._push_spans)]
            self._recent_steps.add(self.version, reduce_metrics([*metrics, *self._push_metrics, *times]))

    def _measured(self) -> tuple[list[Metric], tuple[Span, ...]]:
        """Return (metrics of the pushes, all timeline spans) since the last call."""
        measured = self._push_metrics, (*self._push_spans, *self.evaluations.drain_spans(), *self._timeline.drain())
        self._push_metrics, self._push_spans = [], []
        return measured

    def _end_early(self, no_batch: NoBatch) -> list[LearnerReport]:
        """End the run without another batch, and return the reports for the driver.

        Saves a checkpoint and, unless the user stopped the run, pushes and saves the policy.
        """
        events, reason, is_stop = list[LearnerReport](), no_batch.reason, no_batch.why == "stopped"
        if is_stop:
            if self.version > self._saved_version:
                self._checkpoint()
            self._checkpointer.wait()
            saved = f", checkpoint {checkpoint_folder(self.config.run_dir, self.version)}" if self.version else ""
            reason = f"stopped at version {self.version}{saved}"
        else:
            if self.version > self._served_version or self.config.learner.ema_decay:
                self.evaluations.await_end(self.version)
                if self._weights.someone_waits():  # of a resumed run that has no step left
                    events += self._fill()
                events += self._push(is_last=True)
            if self.version > self._saved_version and self.config.checkpoint.every_steps:
                self._checkpoint()
            self._save(is_last=True)
        measured, spans = self._measured()
        told = tuple(measured if self.rank == 0 else ())
        return [TrainingEnded(version=self.version, reason=reason, is_stop=is_stop, metrics=told, spans=spans), *events]

    def status(self) -> Status:
        """Return what this rank does now, whom it waits for, and since when. May be called from any thread."""
        evaluating = self.evaluations.weights
        pushed_to = {"push": self._weights.servers, "eval push": evaluating.servers if evaluating else ()}
        return rank_status(self.rank, self._timeline.now(), self.config, pushed_to, self.requests.waits_on)

    def _checkpoint(self) -> list[Metric]:
        """Start a checkpoint of learner and buffer, and return its metrics once the learner's state is copied."""
        start_s = time.monotonic()
        with self._timeline.span("checkpoint", "copy"):
            state = TrainingState(
                version=self.version, lineage=self._lineage, ranks=dist.get_world_size(),
                networks=self._checkpointer.counts(), kl_coef=self._updater.objective.kl_coef,
                buffer=self._client.buffer_checkpoint(self.version) if self._client else {},
            )
            target = checkpoint_folder(self.config.run_dir, self.version)
            self._checkpointer.save(target, state, self._recent_steps.text())
        self._saved_version = self.version
        return [
            Metric("checkpoint/pause_s", time.monotonic() - start_s, unit="s"),
            Metric("checkpoint/last_write_s", self._checkpointer.write_s, unit="s"),
        ]

    def _checkpoint_on_request(self) -> None:
        """Start a checkpoint unless this version has one. Its metrics are reported with the next step."""
        self.requests.saved()
        if self.version > self._saved_version:
            self._push_metrics += self._checkpoint()

    def _wait_paused(self) -> None:
        """Wait for the end of a pause, at most a few seconds."""
        with self._timeline.span("other", PAUSE):
            if self.rank == 0:
                self.requests.wait_paused()

    def _save(self, *, is_last: bool) -> None:
        """Save the policy in the folders that are due now: run_dir/models/step_N, and at the end run_dir/model."""
        for target in due_folders(self.config, self.version, is_last=is_last):
            with self._timeline.span("checkpoint", "save"), self._updater.averaged():
                save_policy(self._updater.policy, Path(self.config.model.path), target, self.rank == 0)

    def _close(self) -> None:
        with self._timeline.span("checkpoint", "write"):
            self._checkpointer.close()
            if self._log_ratios:
                self._log_ratios.close()
        if self._client:
            self._client.close()
        self._weights.close()
        self.evaluations.close()
        self._gpus.close()
        dist.destroy_process_group()


def _counts(report: PushReport, events: Sequence[ServersLost | ServersFilled]) -> list[Metric]:
    """Return the metrics of a push that count servers and repeats, without those that are 0."""
    counts = {
        "push/lost_servers": sum(len(each.servers) for each in events if isinstance(each, ServersLost)),
        "parity/weights/compared": report.num_compared, "parity/weights/unequal": report.num_unequal,
        "push/repeats": report.num_repeats,
    }
    return [Metric(key, float(count), "sum") for key, count in counts.items() if count]


def _is_over(run: RunConfig, elapsed_s: float) -> bool:
    """Return on every rank whether rank 0's `elapsed_s` has reached run.seconds. Collective."""
    if not run.seconds:
        return False
    is_over = torch.tensor(elapsed_s >= run.seconds)
    dist.broadcast(is_over, 0)
    return bool(is_over)


def step_times(spans: Sequence[Span]) -> list[Metric]:
    """Return the metrics of STEP_TIMES: how many seconds of a step rank 0 waited, trained, pushed, and so on."""
    seconds = dict.fromkeys(("time/wait_data_s", "time/train_s", "time/sync_s"), 0.0)
    for span in spans:
        if span.pool == "learner/0" and (key := STEP_TIMES.get(span.name)):
            seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    return [Metric(key, value, "sum", over_steps="mean", unit="s") for key, value in seconds.items()]


def rank_status(
    rank: int, now: tuple[str, str, float], config: Config, pushed_to: Mapping[str, Sequence[str]],
    pause_waits_on: str = "",
) -> Status:
    """Return the status of a learner rank: what it does, whom it waits for, and how long it may.

    Args:
        now: (state, name of the span, start by time.monotonic()) of the rank's timeline.
        pushed_to: [name of a push's span] the servers that get the weights. Only rank 0 knows them.
        pause_waits_on: what a pause of the learner waits on.
    """
    (state, name, since_s), timeouts = now, config.timeouts
    others = "buffer" if rank == 0 else "learner/0"
    match state:
        case "eval":
            on = "the held-out evaluation"
            return Status(doing="holds its push", waits_on=on, since_s=since_s, limit_s=timeouts.batch_s)
        case "wait_data":
            doing = "waits for running groups to end" if name == "drain" else "waits for a batch"
            return Status(doing=doing, waits_on=others, since_s=since_s, limit_s=timeouts.batch_s)
        case "sync":
            servers = pushed_to.get(name, pushed_to["push"])
            # To join the weight group, and to push. Each server may die in a push, which is repeated without that one.
            limit_s = 2 * timeouts.push_s * (1 + len(config.server_names))
            on = ", ".join(servers) if rank == 0 else "learner/0"
            return Status(doing="pushes weights", waits_on=on, since_s=since_s, limit_s=limit_s)
        case "checkpoint":
            on = "the disk" if config.placement.learner.ranks == 1 else "the disk, or another rank"
            # the write before, and this one: a wait of the rank itself for one of them ends first, and says more
            return Status(doing="saves", waits_on=on, since_s=since_s, limit_s=2 * timeouts.batch_s)
    if name == PAUSE:
        return Status(doing="is paused", waits_on=pause_waits_on or "learner/0", since_s=since_s)
    return Status(doing=_WORDS.get(state, state), since_s=since_s)
