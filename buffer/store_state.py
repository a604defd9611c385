"""The state of the buffer's store: a row for each group that still runs or may still be trained, and counts.

    StoredGroup      the row of a group, which the journal keeps too
    GroupAccounting  counts groups and their outcomes since the start of the run
    StoreState       the rows by state, and all other values of the store
    FlatGroups       counts groups with nothing to train on, and says when a run ends because of them

`StoreState.rows` and `scalars` return the state as plain values, and `restore` fills an empty state from them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from async_rl.base.errors import StalenessError
from async_rl.base.messages.codec import GroupColumns
from async_rl.base.types import Slot
from buffer.prompt_order import PromptRecords
from buffer.wire import Frame

DropReason = Literal["late", "zero_variance", "failed", "future_version", "shutdown"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
State = Literal["running", "finished", "held", "used", "trained", "dropped"]
"""The state of a group: running -> finished -> held by the learner -> used (may be in a batch again) or trained. A
running or finished group may also be dropped. The states `trained` and `dropped` are final."""


class Arrival(NamedTuple):
    """The facts of a finished group that rules and counts need. With them the buffer decodes each group only once."""

    newest_version: int
    response_tokens: float
    """The mean number of trained tokens of an episode."""
    reward: float
    """The mean reward of the episodes. If all rewards are equal, it is exactly that number."""
    equal_rewards: bool
    """Whether all episodes have the same reward."""
    duration_s: float

    @classmethod
    def of(cls, group: GroupColumns) -> Arrival:
        rewards = group.episode_rewards
        size, equal = len(rewards), min(rewards) == max(rewards)
        return cls(
            group.newest_version, sum(group.trained_tokens) / size, rewards[0] if equal else sum(rewards) / size, equal,
            group.facts.duration_s,
        )


class StoredGroup(NamedTuple):
    """Everything the buffer knows of one group. Immutable, so that the journal may hold an older copy.

    It is a tuple because groups change very often, and tuples are fast to make. The journal's table `groups` has the
    fields as columns, with the fields of `arrival` in place of it. trained_versions and payload have tables of their
    own.
    """

    group_id: int
    prompt_index: int
    start_version: int
    worker: str
    request_id: int = 0
    """Id of the worker's `admit` request that was granted this slot. A repeated request gets the same slots."""
    granted_s: float = 0.0
    """When the slot was granted, on the buffer's clock; only for messages and durations."""
    exact_batch: int = -1
    """Number of the batch that the group was admitted for in exact mode; -1 in other modes."""
    state: State = "running"
    drop_reason: DropReason | Literal[""] = ""
    finished_version: int = -1
    """The served version when the group arrived; -1 before that."""
    data_row: int = -1
    """The row of the prompt in task.path, or its number in another task; -1 until the group arrives or fails."""
    error: str = ""
    """The message of a group that was dropped as `failed`."""
    arrival: Arrival | None = None
    trained_versions: tuple[int, ...] = ()
    """Numbers of the batches that the group was trained in, one for each use."""
    payload: Frame = b""
    """The encoded group as it arrived; empty before that."""

    @property
    def slot(self) -> Slot:
        return Slot(group_id=self.group_id, prompt_index=self.prompt_index, start_version=self.start_version)

    @property
    def newest_version(self) -> int:
        """Version of the group's newest token; while the group runs, its start version, which is the lowest possible.
        """
        return self.arrival.newest_version if self.arrival else self.start_version

    @property
    def is_fresh(self) -> bool:
        """Whether the group was in no trained batch yet."""
        return not self.trained_versions


MEASURED_OUTCOMES = ("trained", "late", "zero_variance", "future_version")
"""The outcomes of a group for which means of length, reward and duration are kept."""

OutcomeStats = dict[str, list[float]]
"""[quantity] the sum over all groups of one outcome, and their number. Quantities: response_tokens, reward, duration_s.
"""


@dataclass(slots=True)
class GroupAccounting:
    """Counts groups since the start of the run: admitted = trained at least once + dropped + still in the store.

    If a prompt is requeued, its first group counts as dropped, and its next group counts as admitted.
    """

    admitted: int = 0
    trained: int = 0
    uses: int = 0
    requeued: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    outcome_stats: dict[str, OutcomeStats] = field(
        default_factory=lambda: {outcome: {} for outcome in MEASURED_OUTCOMES}
    )
    last_failure: str = ""

    def drop(self, row: StoredGroup, reason: DropReason, now_s: float) -> None:
        """Count a dropped group, and add its length, reward and duration to the totals of `reason`.

        A group that was still running adds only its duration up to `now_s`.
        """
        self.dropped[reason] += 1
        self._measure(reason, row, now_s)

    def train(self, row: StoredGroup) -> None:
        self.uses += 1
        if row.is_fresh:
            self.trained += 1
            self._measure("trained", row, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return metrics by name: numbers of groups since the start; mean length, reward and duration by outcome."""
        values = {f"buffer/{name}": float(getattr(self, name)) for name in ("admitted", "trained", "uses", "requeued")}
        values |= {f"buffer/dropped_{reason}": float(self.dropped[reason]) for reason in DROP_REASONS}
        for outcome, stats in self.outcome_stats.items():
            prefix = "buffer/trained" if outcome == "trained" else f"buffer/dropped_{outcome}"
            values |= {f"{prefix}/{name}": total / number for name, (total, number) in stats.items()}
        return values

    def scalars(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stats = {outcome: dict(stats) for outcome, stats in self.outcome_stats.items()}
        return {**plain, "dropped": dict(self.dropped), "outcome_stats": stats}

    def _measure(self, outcome: str, row: StoredGroup, now_s: float) -> None:
        stats = self.outcome_stats.get(outcome)
        if stats is None:
            return
        measured = {"duration_s": now_s - row.granted_s}
        if row.arrival:
            measured = {name: getattr(row.arrival, name) for name in ("response_tokens", "reward", "duration_s")}
        for name, value in measured.items():
            total, number = stats.get(name, (0.0, 0))
            stats[name] = [total + value, number + 1]


class StoreState:
    """The rows of live groups by state (running, finished, held, used), and all other values of the store (scalars).

    Args:
        record: called with every row that is new or changed, also when it is trained or dropped and leaves this state.
        record_streak: called with the position of a question and its new streak (buffer/prompt_order.py).
    """

    def __init__(
        self, record: Callable[[StoredGroup], None] | None = None,
        record_streak: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self._record = record
        self.version = 0
        """Number of batches trained so far; it is also the newest policy version."""
        self.served_version: int | None = None
        self.first_version = 0
        """The first version of exact mode: 0, or the version of a resume that dropped all groups."""
        self.is_draining = False
        """Whether no group may start because a push waits for the running ones (weight_sync.on_update=drain)."""
        self.aborts: dict[str, list[int]] = {}
        """[worker] ids of groups that were dropped while the worker ran them. An id stays until the worker acknowledges
        it.
        """
        self.next_group_id = 0
        self.next_prompt = 0
        self.requeued: deque[int] = deque()
        """Prompt indices that are granted again, before new ones."""
        self.unserved: Counter[int] = Counter()
        """[version] number of fresh groups in the batch that yielded this version. Their slots are held until it is
        served.
        """
        self.accounting = GroupAccounting()
        self.prompts = PromptRecords(record_streak)
        self.running: dict[int, StoredGroup] = {}
        self.finished: dict[int, StoredGroup] = {}
        self.held: dict[int, StoredGroup] = {}
        self.used: dict[int, StoredGroup] = {}
        self._live: dict[State, dict[int, StoredGroup]] = {
            "running": self.running, "finished": self.finished, "held": self.held, "used": self.used,
        }
        self.starts: dict[State, Counter[int]] = {"running": Counter(), "finished": Counter()}
        """[state][start version] number of groups. The policies read these counts whenever a group arrives, so that the
        time of a check does not grow with the number of groups."""
        self.newest: Counter[int] = Counter()
        """[version of the newest token] number of finished groups."""
        self.num_held_fresh = 0
        """Number of held groups that were in no earlier batch."""

    @property
    def slots_held(self) -> int:
        return len(self.running) + len(self.finished) + self.num_held_fresh + self.unserved.total()

    def rows(self) -> list[StoredGroup]:
        """Return the rows of all live groups, sorted by group id."""
        return sorted((row for rows in self._live.values() for row in rows.values()), key=lambda row: row.group_id)

    def put(self, row: StoredGroup, state: State, **changes: Any) -> None:
        """Add a group, or move it to `state`, with `changes` of its fields, and record it.

        A group that is now trained for the last time or dropped is recorded, but no longer kept here.
        """
        if known := self._live[row.state].pop(row.group_id, None):
            self._count(known, -1)
        row = row._replace(state=state, **changes)
        if state in self._live:
            self._live[state][row.group_id] = row
            self._count(row, +1)
        if self._record:
            self._record(row)

    def _count(self, row: StoredGroup, change: int) -> None:
        counter = self.starts.get(row.state)
        if counter is not None:
            _add(counter, row.start_version, change)
        if row.state == "finished":
            _add(self.newest, row.newest_version, change)
        elif row.state == "held":
            self.num_held_fresh += change * row.is_fresh

    def drop(self, row: StoredGroup, reason: DropReason, requeue: bool, now_s: float = 0.0) -> None:
        self.accounting.drop(row, reason, now_s)
        if requeue:
            self.requeued.append(row.prompt_index)
            self.accounting.requeued += 1
        self.put(row, "dropped", drop_reason=reason)

    def unaccounted(self) -> int:
        """Return how many admitted groups are neither trained, dropped, running, finished nor held. 0 unless a bug."""
        accounting = self.accounting
        live = len(self.running) + len(self.finished) + self.num_held_fresh
        return accounting.admitted - accounting.trained - accounting.dropped.total() - live

    def check_accounting(self) -> None:
        """Raise StalenessError unless each admitted group is counted exactly once."""
        if self.unaccounted():
            counts = self.accounting
            raise StalenessError(
                f"{counts.admitted} groups were admitted, but {counts.trained} are trained, {counts.dropped.total()} "
                f"dropped, {len(self.running)} running, {len(self.finished)} buffered and {self.num_held_fresh} held: "
                "this is a bug"
            )

    def gauges(self) -> dict[str, float]:
        """Return the metrics that describe this moment: the numbers of groups by state, and of slots held.

        A report over several steps averages these metrics. Of all other counters it shows the last value.
        """
        return {
            "buffer/depth": float(len(self.finished)),
            "buffer/running": float(len(self.running)),
            "buffer/held": float(len(self.held)),
            "buffer/used": float(len(self.used)),
            "buffer/slots_held": float(self.slots_held),
        }

    def counters(self) -> dict[str, float]:
        """Return all metrics of the store: the gauges, and the counts since the start of the run."""
        return {
            **self.gauges(),
            "buffer/unaccounted": float(self.unaccounted()),
            **self.accounting.metrics(),
            **self.prompts.metrics(),
        }

    def scalars(self) -> dict[str, Any]:
        """Return all but rows and streaks as plain values for JSON: versions, next ids, requeued prompts and counts."""
        return {
            "version": self.version, "served_version": self.served_version, "first_version": self.first_version,
            "is_draining": self.is_draining,
            "aborts": {worker: list(group_ids) for worker, group_ids in self.aborts.items()},
            "next_group_id": self.next_group_id, "next_prompt": self.next_prompt, "requeued": list(self.requeued),
            "unserved": {str(version): number for version, number in self.unserved.items()},
            "accounting": self.accounting.scalars(), "prompts": self.prompts.scalars(),
        }

    def restore(
        self, rows: Iterable[StoredGroup], scalars: Mapping[str, Any], streaks: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Fill this empty state from the `rows`, `scalars` and (position, streak) pairs of another state.

        Trained and dropped rows are skipped.
        """
        for name in ("version", "served_version", "first_version", "next_group_id", "next_prompt"):
            setattr(self, name, scalars[name])
        self.is_draining = scalars.get("is_draining", False)
        self.aborts = {worker: list(group_ids) for worker, group_ids in scalars.get("aborts", {}).items()}
        self.requeued = deque(scalars["requeued"])
        self.unserved = Counter({int(version): number for version, number in scalars["unserved"].items()})
        accounting = copy.deepcopy(scalars["accounting"])
        self.accounting = GroupAccounting(**{**accounting, "dropped": Counter(accounting["dropped"])})
        self.prompts.restore(scalars["prompts"], streaks)
        for row in sorted(rows, key=lambda row: row.group_id):
            if row.state in self._live:
                self._live[row.state][row.group_id] = row
                self._count(row, +1)


def _add(counter: Counter[int], key: int, change: int) -> None:
    """Add `change` to one count, and delete the key if its count becomes 0, so that the counter stays small."""
    counter[key] += change
    if not counter[key]:
        del counter[key]


FLAT_BATCHES = 8
"""A run ends only after at least this many batches' worth of flat groups (all rewards equal) in a row."""
MANY_GROUPS = 4096
"""This many flat groups in a row end a run, if they are at least FLAT_BATCHES batches' worth. If all have the same
reward, an epoch of groups is enough when it is smaller. If the reward differs from group to group, an epoch is required
when it is larger. The number is large because a single group with different rewards shows that there is something to
learn. Example: if one prompt of 200 gives such a group, a gap this long between two of them has a probability of
exp(-20).
"""


def most_of_one_reward(prompts_per_step: int, epoch: int) -> int:
    """Return how many groups with one and the same reward for all answers must follow each other to end the run.

    If the policy can solve few prompts of a task, most groups have the same reward, and a few batches' worth of them in
    a row come by chance. So every prompt of an epoch has its turn first.

    Args:
        epoch: the number of prompts in an epoch; 0 if it is not known.
    """
    return max(FLAT_BATCHES * prompts_per_step, min(epoch, MANY_GROUPS))


class FlatGroups:
    """Counts flat groups in a row. In a flat group all answers got the same reward, so it has nothing to train on.

    The counts start at 0 when the buffer is restarted.

    Args:
        prompts_per_step: the number of groups in a batch.
        is_right: whether an answer with this reward counts as right.
    """

    def __init__(self, prompts_per_step: int, is_right: Callable[[float], bool]) -> None:
        self._prompts_per_step = prompts_per_step
        self._is_right = is_right
        self._reward = 0.0
        self.num_same = 0
        """Number of flat groups in a row that all have the same reward."""
        self.num_in_row = 0
        """Number of flat groups in a row, whatever the reward of each."""
        self.num_dropped = 0
        """Number of flat groups dropped since the last batch."""

    def add(self, arrival: Arrival) -> None:
        """Count an arrived group. A group with different rewards resets both counts; a new reward restarts `num_same`.
        """
        if arrival.reward != self._reward or not arrival.equal_rewards:
            self.num_same, self._reward = 0, arrival.reward
        self.num_same += arrival.equal_rewards
        self.num_in_row = self.num_in_row + 1 if arrival.equal_rewards else 0

    def why_nothing_is_left(self, version: int, epoch: int) -> str:
        """Return the message that ends the run after too many flat groups in a row; "" while the run may continue.

        Args:
            version: the policy version, for the message.
            epoch: the number of prompts in an epoch; 0 if it is not known.
        """
        if self.num_same >= most_of_one_reward(self._prompts_per_step, epoch):
            return f"{self.num_same} groups in a row had the same reward, {self._reward:g}, for every answer: " + (
                self._said_of_one_reward(version)
            )
        if self.num_in_row >= max(FLAT_BATCHES * self._prompts_per_step, MANY_GROUPS, epoch):
            return (
                f"{self.num_in_row} groups in a row had one reward for all of their answers, though not each the same: "
                "no prompt's answers differed when it was asked last, and so none seems to have anything left to teach "
                f"at version {version}. Raise rollout.group_size or rollout.temperature, choose another data set, or "
                "set algorithm.filter_zero_variance: false, with which such groups are trained on."
            )
        return ""

    def _said_of_one_reward(self, version: int) -> str:
        left = f"and to have nothing left to teach at version {version}"
        if self._is_right(self._reward):
            return f"the task seems to be solved {left}. Choose a harder one."
        if self._reward <= 0:
            return f"the task seems to be out of reach {left}. Choose an easier one, or raise rollout.group_size."
        return (
            f"the task seems to have nothing left to teach at version {version}. This reward is neither that of a "
            "right answer (eval.correct_threshold) nor 0 or less: see what gives it to every answer, and raise "
            "rollout.temperature or choose a reward that tells answers apart."
        )
