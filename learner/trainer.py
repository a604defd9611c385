"""The learner's loop: take a batch, train on it, publish the new version, release its slots, sometimes keep it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import Config
from async_rl.errors import NothingToLearnError
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, lineage_of
from async_rl.telemetry.metrics import Metric, Report
from async_rl.telemetry.nvml import GpuSampler
from async_rl.telemetry.status import Status
from async_rl.telemetry.timeline import Timeline
from async_rl.types import Batch
from async_rl.weights import open_publisher
from buffer.client import LearnerClient
from buffer.protocol.wire import decode_batch
from learner.alarms import Alarms, rules_for
from learner.check_staleness import check_staleness
from learner.checkpointing import Checkpointer
from learner.eval_schedule import EvalSchedule
from learner.models.policy import save_policy
from learner.ranks import broadcast_frames, init_distributed
from learner.server_membership import ServerMembership
from learner.train_step import Updater
from learner.trained_groups import TrainedGroupLedger
from learner.weight_sync import WeightSync

WEIGHTS_WANTED = [b"weights wanted"]
"""In place of a batch's frames."""


class Learner:
    """One rank of the learner. Rank 0 alone talks to the buffer and to the servers.

    Args:
        master_address, master_port: where rank 0 serves the rendezvous of all ranks.
        buffer_address: of the buffer's socket.
        engine_urls: of the rollout servers, in the order of their pools.

    Raises:
        ConfigError: the model can't be trained here.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_address: str, master_port: int, buffer_address: str,
        engine_urls: list[str],
    ) -> None:
        self.config = config
        self.rank = rank
        self.version = 0
        self._device = init_distributed(config, rank, world_size, master_address, master_port)
        self._updater = Updater(config, self._device)
        self._timeline = Timeline(f"learner/{rank}")
        self._gpus = GpuSampler(f"learner/{rank}")
        self._publisher = open_publisher(config, engine_urls, rank, self._device)
        self.servers = ServerMembership()
        """How the driver, from another thread, tells of servers that died or came back; heeded on rank 0."""
        self.evaluations = EvalSchedule(config)
        self._client = LearnerClient(buffer_address, config.timeouts, config.network.keys) if rank == 0 else None
        self._pushes = WeightSync(config, self._updater, self._publisher, self.servers)
        self._alarms = Alarms(rules_for(self._pushes.dtype))
        self._end = ""
        self._stopping = threading.Event()
        self._checkpointer = Checkpointer(config, self._updater.networks, self._device)
        self._consumed = TrainedGroupLedger(config.buffer.max_uses)
        self._lineage = lineage_of(config.run_dir)
        self._saved_version = 0
        self._served_version = 0
        """Every server's, of which groups are sampled."""
        self._waits: list[Metric] = []
        """For how long pushes were held back since the last step's report."""
        if config.run.resume:
            self._resume(Path(config.run.resume))

    def stop(self) -> None:
        """Let `run` end after the step that runs, with a checkpoint. From another thread."""
        self._stopping.set()
        self.evaluations.ended()

    def run(self) -> Iterator[Report]:
        """Consumes batches, produces policy versions; waits for the buffer's hand-out; unblocked by it.

        Yields one Report per step, for the version it produced; metrics are on rank 0's, spans on all. What the driver
        must know before a step has ended comes in reports without metrics. At the end the policy is saved in
        run_dir/model; after `stop` there is only the checkpoint.

        Raises:
            StalenessError: a batch breaks the bound; nothing of it was trained on.
            AsyncRLError: a wait ran out, a push failed, or the numbers stopped being finite.
        """
        self._begin()
        yield from self._tell(self.evaluations.served(self.version))
        is_last = False
        while not is_last:
            start_s = time.time()
            frames = yield from self._take()
            if not frames:
                yield self._end_early()
                break
            batch = decode_batch(frames)
            if self.config.takes_turns:
                self._make_room()
            taken_s = time.time()
            with self._timeline.span("busy", "update"):
                batch, metrics = check_staleness(batch, self.version, self.config.staleness)
                self._consumed.add(group.group_id for group in batch.groups)
                metrics += self._updater.update(batch)
            self.version += 1
            self._checkpointer.check()  # now, not when the next one is due
            if self._client:
                self._client.trained(self.version)
            trained_s = time.time()
            is_last = self._is_last(trained_s)
            is_push_due = self._is_push_due(is_last)
            eval_due = is_push_due and self._push(batch, is_last)
            metrics += self._checkpoint() if self._is_checkpoint_due(is_last) else []
            end_s = time.time()
            metrics += [
                *self._waits, *self._pushes.drain(), *_time_metrics(batch, start_s, taken_s, trained_s, end_s)
            ]
            self._waits.clear()
            alarms, states = self._alarms.check(self.version, metrics)
            metrics += states
            if is_last:
                self._save()
            yield Report(
                step=self.version,
                metrics=tuple(metrics) if self.rank == 0 else (),
                alarms=alarms if self.rank == 0 else (),
                spans=self._timeline.drain() + self._pushes.drain_spans(),
                samples=self._gpus.drain(),
                eval_due=eval_due,
                lost=self._pushes.drain_lost(),
            )
        self._close()

    def _begin(self) -> None:
        """Bring every server to this version and open admission for it."""
        self._publisher.connect()
        if self.version > 0:  # at 0 the servers loaded the same folder
            with self._timeline.span("sync", "push"):
                self._pushes.push(self.version)
        if self._client:
            self._client.served(self.version)
        self._served_version = self.version

    def _tell(self, eval_due: bool) -> Iterator[Report]:
        """What the driver must know before a step has ended, if anything."""
        lost = self._pushes.drain_lost()
        if eval_due or lost:
            yield Report(step=self.version, eval_due=eval_due, lost=lost)

    def _resume(self, folder: Path) -> None:
        cut = self._checkpointer.load(folder)
        self.version = self._saved_version = cut.version
        self.evaluations.resume(cut.version)
        self._updater.objective.kl_coef = cut.kl_coef
        self._consumed = TrainedGroupLedger(self.config.buffer.max_uses, cut.consumed)

    def status(self) -> Status:
        """What this rank does now; from any thread."""
        state, since_s = self._timeline.now()
        timeouts, others = self.config.timeouts, "buffer" if self.rank == 0 else "learner/0"
        match state:
            case "eval":
                on = "the held-out evaluation"
                return Status(doing="holds its push", waits_on=on, since_s=since_s, limit_s=timeouts.eval_s)
            case "wait_data":
                return Status(doing="waits for a batch", waits_on=others, since_s=since_s, limit_s=timeouts.batch_s)
            case "sync":
                servers = self._publisher.servers  # each may die in a push, which is then repeated without it
                limit_s = (timeouts.join_s + timeouts.push_s) * (1 + len(servers))
                return Status(doing="pushes weights", waits_on=", ".join(servers), since_s=since_s, limit_s=limit_s)
        return Status(doing={"busy": "trains", "checkpoint": "saves"}.get(state, state), since_s=since_s)

    def _take(self) -> Generator[Report, None, list[bytes]]:
        """The next batch on every rank: rank 0 passes on the bytes as the buffer sent them. Empty: no batch to come.

        A server that came back is brought up to date meanwhile: the batch may be waiting for its groups, and for those
        of a server that is lost in that push.
        """
        while True:
            with self._timeline.span("wait_data"):
                frames = broadcast_frames(self._poll(), self._device)
            if frames != WEIGHTS_WANTED:
                return frames
            yield from self._tell(eval_due=self._push(None, is_last=False))

    def _poll(self) -> Sequence[bytes | memoryview]:
        if not self._client:
            return []
        try:
            frames = self._client.take_raw(self.version, self._is_wanted_elsewhere)
            return frames if frames or self._stopping.is_set() else WEIGHTS_WANTED
        except NothingToLearnError as error:
            self._end = str(error)
            return []

    def _is_wanted_elsewhere(self) -> bool:
        return self._stopping.is_set() or self.servers.someone_waits()

    def _end_early(self) -> Report:
        """Serve and save what was learned so far; the report says why the run is over."""
        if self._was_stopped():
            return self._end_stopped()
        if self.version > self._served_version:
            with self._timeline.span("sync", "push"):
                self._pushes.push(self.version)
        if self.version > self._saved_version and self.config.checkpoint.every_steps:
            self._checkpoint()
        self._save()
        metrics = tuple(self._pushes.drain()) if self.rank == 0 else ()
        return Report(
            step=self.version, metrics=metrics, spans=self._timeline.drain() + self._pushes.drain_spans(),
            note=self._end, lost=self._pushes.drain_lost(),
        )

    def _was_stopped(self) -> bool:
        """Whether there are no frames because of `stop`: what rank 0 says."""
        stopped = torch.tensor(self._stopping.is_set() and not self._end, device=self._device)
        dist.broadcast(stopped, 0)
        return bool(stopped)

    def _end_stopped(self) -> Report:
        folder = checkpoint_folder(self.config.run_dir, self.version)
        if self.version > self._saved_version:
            self._checkpoint()
        self._checkpointer.wait()
        note = f"stopped at version {self.version}" + (f", checkpoint {folder}" if self.version else "")
        metrics = tuple(self._pushes.drain()) if self.rank == 0 else ()
        spans = self._timeline.drain() + self._pushes.drain_spans()
        return Report(step=self.version, metrics=metrics, spans=spans, note=note)

    def _is_checkpoint_due(self, is_last: bool) -> bool:
        every_steps = self.config.checkpoint.every_steps
        return every_steps > 0 and (is_last or self.version % every_steps == 0)

    def _checkpoint(self) -> list[Metric]:
        """Start to write learner and buffer as they are now, between two batches; training waits for the copy only."""
        start_s = time.time()
        with self._timeline.span("checkpoint", "copy"):
            cut = TrainingState(
                version=self.version, lineage=self._lineage, ranks=dist.get_world_size(),
                networks=self._checkpointer.counts(), kl_coef=self._updater.objective.kl_coef,
                consumed=self._consumed.ranges(),
                buffer=self._client.buffer_checkpoint(self.version) if self._client else {},
            )
            self._checkpointer.save(checkpoint_folder(self.config.run_dir, self.version), cut)
        self._saved_version = self.version
        return [
            Metric("checkpoint/pause_s", time.time() - start_s),
            Metric("checkpoint/last_write_s", self._checkpointer.write_s),
        ]

    def _is_last(self, now_s: float) -> bool:
        """Whether the step that ends now is the last, on every rank alike: by run.steps, or by rank 0's clock."""
        run = self.config.run
        if not hasattr(self, "_first_step_s"):
            self._first_step_s = now_s
        late = torch.tensor(run.seconds > 0 and now_s - self._first_step_s >= run.seconds, device=self._device)
        if run.seconds > 0:
            dist.broadcast(late, 0)
        return self.version >= run.steps or bool(late)

    def _is_push_due(self, is_last: bool) -> bool:
        return is_last or self.version % self.config.weight_sync.every_steps == 0

    def _make_room(self) -> None:
        """Take the servers' share of the GPUs until the next push; an evaluation that holds pushes goes first."""
        if self.config.eval.pin_version:
            self._await_evaluation()
        with self._timeline.span("sync", "make room"):
            if self.rank == 0:
                self._publisher.release_server_memory()
            dist.barrier()

    def _push(self, batch: Batch | None, is_last: bool) -> bool:
        """Make every server serve the current version, then open admission for it.

        Args:
            batch: the step's. None: out of turn, for a server that came back; the others may serve the version already.

        Returns:
            Whether an evaluation of the version is due.
        """
        is_new = self.version > self._served_version
        if is_new and self.config.eval.pin_version:
            self._await_evaluation()
        if is_new and self.config.weight_sync.on_update == "drain" and not is_last:
            self._drain()
        with self._timeline.span("sync", "push"):
            self._pushes.push(self.version)
            if batch:
                self._pushes.verify_once(batch)
            if self._client and is_new and not is_last:  # after the last step nobody may start
                self._client.served(self.version)
        self._served_version = self.version
        return not is_last and self.evaluations.served(self.version)

    def _await_evaluation(self) -> None:
        """Hold the push back until the evaluation that runs, if any, has ended."""
        start_s = time.time()
        with self._timeline.span("eval", "held push"):
            if self.rank == 0:
                self.evaluations.wait()
            dist.barrier()
        self._waits.append(Metric("time/held_by_eval_s", time.time() - start_s, "sum"))

    def _drain(self) -> None:
        """Wait for the groups that run, while no other may start."""
        start_s = time.time()
        with self._timeline.span("wait_data", "drain"):
            if self._client:
                self._client.await_push(self.version)
            dist.barrier()
        self._waits.append(Metric("time/drain_s", time.time() - start_s, "sum"))

    def _save(self) -> None:
        with self._timeline.span("checkpoint", "save"):
            source, target = Path(self.config.model.path), self.config.run_dir / "model"
            save_policy(self._updater.policy, source, target, self.rank == 0)

    def _close(self) -> None:
        with self._timeline.span("checkpoint", "write"):
            self._checkpointer.close()
        if self._client:
            self._client.close()
        self._publisher.close()
        self._gpus.close()
        dist.destroy_process_group()


def _time_metrics(batch: Batch, start_s: float, taken_s: float, trained_s: float, end_s: float) -> list[Metric]:
    trained_tokens = sum(int(r.mask.sum()) for group in batch.groups for r in group.rollouts)
    return [
        Metric("time/step_s", end_s - start_s),
        Metric("time/wait_data_s", taken_s - start_s),
        Metric("time/train_s", trained_s - taken_s),
        Metric("time/sync_s", end_s - trained_s),
        Metric("throughput/trained_tokens_per_s", trained_tokens / max(end_s - start_s, 1e-9)),
    ]
