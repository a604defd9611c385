"""The groups of a run in memory, from admission to the release of their slots. No I/O and no clock.

    admit --> running --finish--> finished --take--> held by the learner --trained--> slot free after `served`
                 |                    |                    ^                |
                 +--late, failed      +--late,             +---- used <-----+--> trained for the last time
                    shutdown             zero_variance,
                                         shutdown

The state is one StoredGroup per live group and a few scalars (store_state.py). So a journal can keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from async_rl.base.config import EvalConfig
from async_rl.base.errors import WireError
from async_rl.base.run_dir.checkpoints import TrainingState
from async_rl.base.types import Slot
from buffer.modes import Mode, open_mode
from buffer.staleness import Rules
from buffer.store_state import Arrival, FlatGroups, StoredGroup, StoreState
from buffer.wire import Frame

if TYPE_CHECKING:
    from buffer.difficulty import PromptDraw


class Store:
    """Admits, stores, hands out and drops the groups of one run, by the rules of buffer/staleness.py.

    No slot is granted before the first call of `served`. `take`, `trained` and `served` may be repeated without harm,
    because a learner that missed the answer asks again. After each call `state` is consistent, so a journal may commit
    it.

    Args:
        rules: the settings of admission and hand-out. They choose the policy in buffer/modes.py.
        state: the state of an earlier buffer; None: an empty one.
        draw: decides which prompts are skipped (task.difficulty); None: none is.
        is_right: says whether a reward means a right answer; None: by the default of eval.correct_threshold.
    """

    def __init__(
        self, rules: Rules, state: StoreState | None = None, draw: PromptDraw | None = None,
        is_right: Callable[[float], bool] | None = None,
    ) -> None:
        self.rules = rules
        self.draw = draw
        self.mode = open_mode(rules)
        self.state = state or StoreState()
        self.end_reason = ""
        """Why there will probably be no further batch; "" while there may be one."""
        self.flat = FlatGroups(rules.prompts_per_step, is_right or EvalConfig().is_right)

    # --- for workers

    def capacity(self) -> int:
        """Return how many groups may start now; 0 before the first `served` and while `may_push` stops admission."""
        return 0 if self.state.is_draining else self.mode.capacity(self.state)

    def running_by_worker(self) -> Counter[str]:
        return Counter(row.worker for row in self.state.running.values())

    def admit(self, worker: str, max_groups: int, now_s: float, request_id: int = 0) -> list[Slot]:
        """Grant `worker` the free slots, at most `max_groups`, and return them. Requeued prompts come first.

        Args:
            request_id: id of the worker's request. A restarted buffer recognizes a repeated request by it.
        """
        slots = []
        for batch in self.mode.batches_of_new(self.state, min(max_groups, self.capacity())):
            assert self.state.served_version is not None
            prompt_index = self._next_prompt()
            row = StoredGroup(
                group_id=self.state.next_group_id, prompt_index=prompt_index,
                start_version=self.state.served_version, worker=worker, request_id=request_id, granted_s=now_s,
                exact_batch=batch,
            )
            self.state.next_group_id += 1
            self.state.accounting.admitted += 1
            self.state.put(row, "running")
            slots.append(row.slot)
        return slots

    def running_slot(self, group_id: int, worker: str) -> Slot | None:
        """Return the slot of a group that `worker` runs; None if the group is already finished or dropped.

        Raises WireError if the slot was never granted, or was granted to another worker.
        """
        if group_id >= self.state.next_group_id:
            granted = f"one that was granted ({self.state.next_group_id} so far)"
            raise WireError(f"group_id: got {group_id}, allowed {granted}")
        row = self.state.running.get(group_id)
        if row is None:
            return None
        if row.worker != worker:
            raise WireError(f"worker: got {worker!r}, allowed {row.worker!r}, who was granted group {group_id}")
        return row.slot

    def finish(
        self, group_id: int, payload: Frame, arrival: Arrival, drop_equal: bool = False, data_row: int = -1
    ) -> None:
        """Store a group that its worker has finished; with `drop_equal`, drop it if all its rewards are equal.

        Args:
            payload: the encoded group.
            arrival: the facts of the group that the rules and counts need.
            data_row: the row of the prompt in task.path, or its number in another task.
        """
        assert self.state.served_version is not None
        row = self.state.running[group_id]._replace(
            payload=payload, arrival=arrival, finished_version=self.state.served_version, data_row=data_row
        )
        self.flat.add(arrival)
        if self.draw:
            self.draw.arrived(row.prompt_index, arrival, self.state.prompts)
        if drop_equal and arrival.equal_rewards:
            self.state.drop(row, "zero_variance", requeue=False)
            self.flat.num_dropped += 1
            self.end_reason = self.flat.why_nothing_is_left(self.state.version, self.state.prompts.num_per_epoch)
        else:
            self.end_reason = ""
            self.state.put(row, "finished")

    def fail(self, group_id: int, cause: str, requeue: bool, data_row: int = -1) -> None:
        """Drop a running group that has no result, and free its slot. With `requeue` a later group gets its prompt.

        Args:
            cause: why the group failed, for messages and the journal.
            data_row: the row of the prompt in task.path, or its number in another task; -1: not known.
        """
        self.state.accounting.last_failure = cause
        row = self.state.running[group_id]._replace(error=cause, data_row=data_row)
        self.state.drop(row, "failed", requeue)

    def abandon(self, worker: str) -> int:
        """Drop all running groups of a worker that died, requeue their prompts, and return the number of groups."""
        lost = [group_id for group_id, row in self.state.running.items() if row.worker == worker]
        for group_id in lost:
            self.fail(group_id, f"{worker} is gone", requeue=True)
        self.state.aborts.pop(worker, None)
        return len(lost)

    def aborts(self, worker: str) -> list[int]:
        """Return the ids of groups that `worker` must stop: dropped while it ran them, and not yet acknowledged by it.
        """
        return self.state.aborts.get(worker, [])

    def acknowledge_aborts(self, worker: str, group_ids: Iterable[int]) -> None:
        received = set(group_ids)
        self.state.aborts[worker] = [group_id for group_id in self.aborts(worker) if group_id not in received]

    # --- for the learner

    def check_version(self, version: int) -> None:
        """Raise WireError unless `version` is the number of batches trained so far."""
        if version != self.state.version:
            raise WireError(f"version: got {version}, allowed {self.state.version}, the batches trained so far")

    def take(self, version: int, now_s: float = 0.0) -> list[StoredGroup] | None:
        """Choose the groups of batch `version` and return them, sorted by id; None if more groups must finish first.

        Returns immediately. The learner holds the batch until it calls `trained`; a repeated `take` returns the same
        batch. The call also drops groups that are too old to be trained on at this or any later version.

        Raises WireError if `version` is not the number of batches trained so far, and StalenessError if a chosen group
        has missed its deadline.
        """
        self.check_version(version)
        if not self.state.held:
            self._drop_late(self.mode.too_old(self.state, version), now_s)
            chosen = self.mode.choose(self.state, version)
            if chosen is None:
                return None
            self.flat.num_dropped = 0
            for row in chosen:
                self.mode.check(row, self.state, version)
                self.state.put(row, "held")
            self._drop_late(self.mode.left_late(self.state, version), now_s)
        return [self.state.held[group_id] for group_id in sorted(self.state.held)]

    @property
    def misses_late(self) -> bool:
        """Whether enough groups have finished for a batch, so that the learner waits only for groups about to expire.
        """
        return self.mode.misses_late(self.state)

    def trained(self, version: int) -> None:
        """Record that the learner has trained on its batch, and that `version` is now the newest policy version.

        From now on arriving groups may have tokens of `version`. A repeated call changes nothing.

        Raises WireError if the learner holds no batch that yields this version.
        """
        if version == self.state.version:
            return
        if not self.state.held or version != self.state.version + 1:
            held = f"holds batch {self.state.version}" if self.state.held else "holds no batch"
            raise WireError(f"version: got {version}, allowed the next after {self.state.version}; the learner {held}")
        self.state.unserved[version] = self.state.num_held_fresh
        self.state.version = version
        for row in list(self.state.held.values()):
            self.state.accounting.train(row)
            uses = (*row.trained_versions, version - 1)
            is_last = len(uses) >= self.rules.max_uses
            self.state.put(row, "trained" if is_last else "used", trained_versions=uses)
        for row in list(self.state.used.values()):
            if self.mode.deadline(row) < version:
                self.state.put(row, "trained")

    def may_push(self) -> bool:
        """Return whether the learner may push its newest version now. With weight_sync.on_update=drain, stop admission.

        With `drain` a push waits until no group runs, and admission stays stopped until `served`. In exact mode a push
        waits until all groups of the served version were admitted and have arrived. In all other cases it need not
        wait.
        """
        self.state.is_draining = self.mode.holds_admission
        return self.mode.may_push(self.state)

    def served(self, version: int) -> None:
        """Record that every live server serves `version` or a later one.

        This frees the slots of groups whose batch yielded `version` or an earlier version.

        Raises WireError if this version was not trained yet, or if the served version would fall.
        """
        lowest = self.state.served_version or 0
        if not lowest <= version <= self.state.version:
            raise WireError(f"version: got {version}, allowed {lowest}..{self.state.version} (served..trained)")
        self.state.served_version = version
        self.state.is_draining = False
        for trained_version in [v for v in self.state.unserved if v <= version]:
            del self.state.unserved[trained_version]

    # --- for the run

    def close(self) -> None:
        """Drop all running and finished groups as `shutdown` when the run ends. A batch held by the learner is kept."""
        for row in [*self.state.running.values(), *self.state.finished.values()]:
            self.state.drop(row, "shutdown", requeue=False)
        for row in list(self.state.used.values()):
            self.state.put(row, "trained")
        self.state.check_accounting()

    def describe(self, now_s: float) -> str:
        """Return a text that says what the next batch waits for. The learner shows it in its timeout error."""
        state = self.state
        parts = [self.mode.describe_finished(state)]
        if state.running:
            oldest = min(state.running.values(), key=lambda row: row.granted_s)
            age_s = now_s - oldest.granted_s
            parts.append(f"{len(state.running)} running (oldest {age_s:.0f} s, worker {oldest.worker})")
        else:
            parts.append("0 running")
        if self.misses_late and (late := self.mode.describe_late(state)):
            parts.append(late)
        served = state.served_version
        parts.append("no version served yet" if served is None else f"served version {served}")
        if self.flat.num_dropped:
            parts.append(
                f"{self.flat.num_dropped} dropped as zero_variance since the last batch "
                "(algorithm.filter_zero_variance: every answer of the group had the same reward)"
            )
        if state.accounting.last_failure:
            failed = state.accounting.dropped["failed"]
            parts.append(f"{failed} failed so far, the last one: {state.accounting.last_failure}")
        return ", ".join(parts)

    # --- private

    def _drop_late(self, rows: Iterable[StoredGroup], now_s: float) -> None:
        """Drop these groups as late. If a group still runs, its worker learns of the drop through `aborts`."""
        for row in rows:
            if row.state == "running":
                self.state.aborts.setdefault(row.worker, []).append(row.group_id)
            self.state.drop(row, "late", requeue=True, now_s=now_s)

    def _next_prompt(self) -> int:
        """Return the prompt index for the next group: a requeued prompt, else the next one that `draw` does not skip.
        """
        state = self.state
        if state.requeued:
            return state.requeued.popleft()
        index = self.draw.take(state.next_prompt, state.prompts) if self.draw else state.next_prompt
        state.next_prompt = index + 1
        return index


def buffer_checkpoint(state: StoreState) -> dict[str, Any]:
    """Return the buffer's part of a checkpoint, as plain values for JSON. It has three keys:

        scalars   the versions, next ids and counts of `state` (StoreState.scalars)
        live      [group id, prompt index, start version, batch number in exact mode or -1] of each group that is in no
                  trained batch yet
        streaks   [position of the question, streak] of each prompt with a streak (buffer/difficulty.py)
    """
    live = [row for row in state.rows() if row.is_fresh]
    return {
        "scalars": state.scalars(),
        "live": [[row.group_id, row.prompt_index, row.start_version, row.exact_batch] for row in live],
        "streaks": [[position, streak] for position, streak in state.prompts.streaks.items()],
    }


def restore_checkpoint(
    saved: TrainingState, state: StoreState, mode: Mode, past: Mapping[int, StoredGroup]
) -> list[int]:
    """Fill the empty `state` from the checkpoint `saved`, and return the ids of the groups whose payloads are needed.

    A group of the checkpoint continues if it arrived and the checkpoint's weights are as new as its tokens. The others
    are dropped and their prompts requeued, for one of these reasons:

        failed           it never arrived; in exact mode all groups, if a batch would stay incomplete
        future_version   a token has a version after the checkpoint, and the weights of that version are gone
        late             it has missed its deadline, or exceeds the capacity of settings that were changed

    Args:
        past: [group id] a group that arrived before the earlier run ended, perhaps after the checkpoint.

    Returns:
        The ids of all groups that arrived with tokens of known versions, even if they are dropped as `late` or
            `failed`.
    """
    rows = [
        StoredGroup(group_id=g, prompt_index=p, start_version=s, worker="", exact_batch=b)
        for g, p, s, b in saved.buffer["live"]
    ]
    state.restore(rows, saved.buffer["scalars"], saved.buffer["streaks"])
    state.version, state.served_version = saved.version, None
    state.unserved.clear()
    state.aborts.clear()  # the workers that ran those groups are gone
    arrived = []
    for row in rows:
        found = past.get(row.group_id)
        if found is None or found.slot != row.slot:
            state.drop(row, "failed", requeue=True)
        elif found.newest_version > saved.version:
            state.drop(row._replace(arrival=found.arrival), "future_version", requeue=True)
        else:
            finished_version = min(found.finished_version, saved.version)
            arrived.append(row._replace(
                payload=found.payload, arrival=found.arrival, finished_version=finished_version, worker=found.worker,
                data_row=found.data_row,
            ))
    arrived.sort(key=lambda row: (mode.deadline(row), row.group_id))
    for row, reason in zip(arrived, mode.drops_at_resume(arrived, state, saved.version), strict=True):
        if reason:
            state.drop(row, reason, requeue=True)
        else:
            state.put(row, "finished")
    state.check_accounting()
    return [row.group_id for row in arrived]
