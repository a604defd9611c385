"""Applies the requests of clients to the store, and makes the replies.

A request is answered immediately, or parked until it can be answered. For example, `take` is parked until a batch is
complete. An invalid request is refused: it changes nothing, and its sender gets the reason.

This module has no socket and no journal. The operations are listed in buffer/wire.py.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import WireError
from async_rl.base.messages.codec import GroupColumns, check_group
from async_rl.base.messages.fields import Fields, Limits
from async_rl.base.types import MAX_CAUSE_CHARS
from buffer.prompt_order import MAX_PROMPTS
from buffer.store import Store, buffer_checkpoint
from buffer.store_state import Arrival
from buffer.wire import (
    MAX_ANSWERED,
    MAX_ERROR_CHARS,
    Frame,
    Request,
    batch_frames,
    pack_reply,
    pack_slots,
    read_request,
    read_request_id,
    view,
)

MAX_WAIT_S = 60.0
MAX_ACKNOWLEDGED = 2**20
MAX_SOURCES = 2**16
LEARNER = "learner"
LATE = "buffer/waited_for_late_s"
"""The metric of the learner's waits for late groups. `buffer/waited_s` measures all of its waits for a batch."""


@dataclass(slots=True)
class Parked:
    """A request that can't be fulfilled yet. It is answered when it can be, or when its wait ends."""

    identity: bytes
    """The client's ZMQ identity."""
    request: Request
    until_s: float
    """The end of the wait, by time.monotonic."""
    max_groups: int = 0
    """For `admit`: the number of groups that the worker can start."""
    version: int = 0
    """For `take` and `may_push`: the learner's policy version."""


@dataclass(slots=True)
class Outgoing:
    """A reply to one client. It answers all of the client's requests in `ids`."""

    identity: bytes
    """The client's ZMQ identity."""
    ids: list[int]
    result: dict[str, Any]
    error: str = ""
    batch: Sequence[Frame] = ()

    def frames(self) -> list[Frame]:
        return [self.identity, pack_reply(self.ids, self.result, self.error), *self.batch]


class Operations:
    """Applies requests to the store of one run. Call `handle` with each message, then `replies` for what to send.

    No worker gets slots before the learner has called `served(0)`. All workers with which the run begins must also have
    asked for slots. Otherwise the first one would get all.

    Args:
        record_group: called with every group that is stored; None: there is no journal.
    """

    def __init__(
        self, config: Config, store: Store, record_group: Callable[[GroupColumns], None] | None = None
    ) -> None:
        self.store = store
        self.limits = Limits.from_config(config)
        self.refused = 0
        self.restarts = 0
        self._workers = [f"rollout/{i}" for i in range(config.placement.rollout.most)]
        self._fewest_workers = config.placement.rollout.fewest
        self._drop_equal = config.drops_zero_variance
        self._record_group = record_group
        self._last_grant: dict[str, tuple[int, dict[str, Any]]] = {}
        """The request id and the result of each worker's last `admit`, in case the worker repeats it."""
        self._seen_workers: set[str] = set()
        self._has_prompts = False
        """Whether a worker has sent its prompts. False after a restart of the buffer."""
        self._has_ended = False
        """Whether the servers may have weights that the learner does not train: then no group is stored."""
        self._incarnations: dict[str, int] = {}
        """The newest known incarnation of each worker that has started again; 1 of every other worker."""
        self._retired: dict[str, int] = {}
        """The incarnation of each worker that leaves. Empty after a restart of the buffer: the driver retires again."""
        self._parked: dict[tuple[str, str], Parked] = {}
        """Parked requests by (operation, worker). The key of the learner's request is (LEARNER, "")."""
        self._waits = {"buffer/waited_s": LearnerWaits(), LATE: LearnerWaits()}
        self._replies: list[Outgoing] = []
        self._open_acks: dict[tuple[bytes, bool], Outgoing] = {}
        """Replies that later puts may share, by (client, whether the groups were stored)."""

    def scalars(self) -> dict[str, Any]:
        """Return what `restore` needs besides the store, as plain values for JSON."""
        return {
            "refused": self.refused, "restarts": self.restarts, "incarnations": dict(self._incarnations),
            "has_ended": self._has_ended,
        }

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Continue from the restored store after a restart of the buffer. Clients do not notice the restart.

        For example, a worker that repeats its last `admit` gets the same slots again.

        Args:
            scalars: the result of `scalars` before the restart.
        """
        self.refused, self.restarts = scalars["refused"], scalars["restarts"] + 1
        self._incarnations, self._has_ended = dict(scalars["incarnations"]), scalars["has_ended"]
        # A worker that missed the answer with its last grant asks again, with the same request id.
        state = self.store.state
        for worker, request_id in {row.worker: row.request_id for row in state.rows()}.items():
            slots = [row.slot for row in state.running.values() if row.request_id == request_id]
            self._last_grant[worker] = (request_id, pack_slots(slots))
        if state.next_group_id:  # a group was granted, so all workers had asked
            self._seen_workers.update(self._workers)

    def handle(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Apply, park or refuse a client's message. `replies` returns the answer.

        Args:
            identity: the client's ZMQ identity.
        """
        try:
            request = read_request(frames)
            if request.op == "put":
                self._acknowledge(identity, request.id, self._put(request))
            elif (result := self._apply(identity, request)) is not None:
                self._replies.append(Outgoing(identity, [request.id], result))
        except WireError as error:
            self.refused += 1
            self._replies.append(Outgoing(identity, [read_request_id(frames)], {}, str(error)[:MAX_ERROR_CHARS]))

    def replies(self, now_s: float) -> list[Outgoing]:
        """Return the replies to send now.

        They answer the messages since the last call, and the parked requests that can be fulfilled or whose wait has
        ended.
        """
        if parked := self._parked.get((LEARNER, "")):  # it comes first: a batch may drop groups, which frees slots
            self._reply_to_learner(parked, now_s)
        shares = self._shares()
        for (op, worker), parked in list(self._parked.items()):
            result: dict[str, Any] | None = None
            if op == "aborts" and ((groups := self.store.aborts(worker)) or parked.until_s <= now_s):
                result = {"groups": groups}
            elif op == "admit" and (shares.get(worker) or parked.until_s <= now_s):
                slots = self.store.admit(worker, shares.get(worker, 0), now_s, request_id=parked.request.id)
                result = pack_slots(slots)
                self._last_grant[worker] = (parked.request.id, result)
            if result is not None:
                del self._parked[op, worker]
                self._replies.append(Outgoing(parked.identity, [parked.request.id], result))
        replies, self._replies = self._replies, []
        self._open_acks.clear()
        return replies

    def next_due_s(self) -> float:
        """Return the earliest end of a parked request's wait, by time.monotonic; infinity if none is parked."""
        return min((parked.until_s for parked in self._parked.values()), default=float("inf"))

    def abandon(self, worker: str, incarnation: int) -> int:
        """Fail the running groups of a lost worker, and return their number. Their prompts are granted again.

        The first grant does not wait for a worker that is lost before it has asked for prompts.

        Args:
            worker: the worker's name, such as rollout/0.
            incarnation: the number of the start that replaces the lost worker. Requests with a lower number are
                refused from now on.
        """
        self._incarnations[worker] = incarnation
        self._seen_workers.add(worker)
        for op in ("admit", "aborts"):
            self._parked.pop((op, worker), None)
        return self.store.abandon(worker)

    def retire(self, worker: str, incarnation: int) -> int:
        """Grant no more slots to a worker that leaves, and return the number of its running groups.

        Its running groups may still arrive. A later start of the worker gets slots.

        Args:
            incarnation: the number of the start that leaves.
        """
        self._retired[worker] = incarnation
        return self.store.running_by_worker().get(worker, 0)

    def counters(self) -> dict[str, float]:
        more = {"buffer/refused": float(self.refused), "buffer/restarts": float(self.restarts)}
        return {**self.store.state.counters(), **more}

    def describe(self, now_s: float) -> str:
        """Return what the next batch waits for, as text for messages."""
        missing = self._fewest_workers - len(self._seen_workers)
        if missing > 0:
            return f"{missing} of {self._fewest_workers} rollout workers have not asked for prompts yet"
        return self.store.describe(now_s)

    def _apply(self, identity: bytes, request: Request) -> dict[str, Any] | None:
        """Apply a request, and return its result; None if it was parked, so that `replies` answers it later.

        Raises:
            WireError: the request is invalid.
        """
        fields = request.fields
        match request.op:
            case "admit":
                worker, max_groups = self._worker(fields), fields.integer("max_groups", 1, 2**20)
                if self.store.draw and not self.store.state.prompts.sources:
                    raise WireError("op: got admit, allowed prompts before it, with task.difficulty")
                last_id, last_result = self._last_grant.get(worker, (-1, {}))
                if request.id == last_id:
                    return last_result
                self._park("admit", worker, identity, request, max_groups=max_groups)
                self._seen_workers.add(worker)
                return None
            case "prompts":
                self._worker(fields)
                self._learn_prompts(fields)
            case "aborts":
                worker, acknowledged = self._worker(fields), fields.items("acknowledged", 0, MAX_ACKNOWLEDGED)
                if not all(type(group_id) is int for group_id in acknowledged):
                    raise fields.refuse("acknowledged", "a list of group ids")
                self._park("aborts", worker, identity, request)
                self.store.acknowledge_aborts(worker, acknowledged)
                return None
            case "take" | "may_push":
                version = fields.integer("version", 0)
                self.store.check_version(version)
                self._park(LEARNER, "", identity, request, version=version)
                return None
            case "fail":
                worker, group_id = self._worker(fields), fields.integer("group_id", 0)
                cause, requeue = fields.text("cause", MAX_CAUSE_CHARS), fields.boolean("requeue")
                data_row = fields.integer("data_row", -1)
                if self.store.running_slot(group_id, worker):
                    self.store.fail(group_id, cause, requeue, data_row)
                    self._can_start_one_more(worker)
            case "trained":
                self.store.trained(fields.integer("version", 0))
                self._parked.pop((LEARNER, ""), None)  # a repeat of the `take` before it, whose answer has arrived
            case "served":
                self.store.served(fields.integer("version", 0))
                self._parked.pop((LEARNER, ""), None)  # likewise, of `may_push`
            case "ended":
                self.store.check_version(fields.integer("version", 0))
                self._has_ended = True
            case "checkpoint":
                self.store.check_version(fields.integer("version", 0))
                return buffer_checkpoint(self.store.state)
        return {}

    def _park(self, kind: str, worker: str, identity: bytes, request: Request, **asked: Any) -> None:
        wait_s = min(request.fields.number("wait_s", 0.0), MAX_WAIT_S)
        self._parked[kind, worker] = Parked(identity, request, time.monotonic() + wait_s, **asked)

    def _acknowledge(self, identity: bytes, request_id: int, stored: bool) -> None:
        """Answer a `put`, if possible together with other puts of its client.

        Until the next call of `replies`, the client's stored puts share one reply, and its other puts another. A reply
        has the counts of flat groups after its last `put`.
        """
        reply = self._open_acks.get((identity, stored))
        if reply is None or len(reply.ids) == MAX_ANSWERED:
            reply = self._open_acks[identity, stored] = Outgoing(identity, [], {"stored": stored})
            self._replies.append(reply)
        reply.ids.append(request_id)
        reply.result["flat_groups"] = [self.store.flat.num_same, self.store.flat.num_in_row]

    def _learn_prompts(self, fields: Fields) -> None:
        sources = fields.items("sources", 1, MAX_SOURCES)
        for source in sources:
            if not (isinstance(source, list) and [type(each) for each in source] == [int, int] and min(source) > 0):
                raise fields.refuse("sources", "a list of pairs of whole numbers above 0")
        if (most := max(map(sum, zip(*sources, strict=True)))) > MAX_PROMPTS:
            raise fields.refuse("sources", f"at most {MAX_PROMPTS} prompts, of all sources and in an epoch", most)
        prompts = self.store.state.prompts
        if self.store.draw and self._has_prompts and prompts.sources != sources:
            raise fields.refuse(
                "sources", f"{str(prompts.sources)[:200]}, the numbers of prompts of another worker: with "
                "task.difficulty, task.path must hold the same rows on all hosts"
            )  # fmt: skip
        self._has_prompts = True
        prompts.learn(sources)

    def _worker(self, fields: Fields) -> str:
        worker = fields.text("worker")
        if worker not in self._workers:  # a slot granted to an unknown worker would never be released
            raise fields.refuse("worker", f"one of the run's: {', '.join(self._workers)[:200]}")
        newest, incarnation = self._incarnations.get(worker, 1), fields.integer("incarnation", 1)
        if incarnation < newest:
            raise fields.refuse("incarnation", f"{newest}: a later start of {worker} has taken its place")
        if incarnation > newest:
            self.abandon(worker, incarnation)
        return worker

    def _put(self, request: Request) -> bool:
        """Store the group of a `put` and return True. Returns False if it was stored or dropped before, or is too late.

        Raises:
            WireError: the group is invalid, or differs from its grant.
        """
        worker, payload = self._worker(request.fields), request.payload[0]
        slot = self.store.running_slot(request.fields.integer("group_id", 0), worker)
        if slot is None or self._has_ended:  # e.g. a repeated `put`, whose group need not be read
            return False
        group = check_group(view(payload), self.limits)
        facts = group.facts
        for field in ("group_id", "prompt_index", "start_version"):
            got, granted = getattr(facts, field), getattr(slot, field)
            if got != granted:
                raise WireError(f"{field}: got {got}, allowed {granted} as granted to group {slot.group_id}")
        announced = self.store.state.version
        if group.newest_version > announced:
            raise WireError(f"versions: got {group.newest_version}, allowed at most {announced}, the newest announced")
        self.store.finish(slot.group_id, payload, Arrival.of(group), self._drop_equal, facts.data_row)
        self._can_start_one_more(worker)
        if self._record_group:
            self._record_group(group)
        return True

    def _can_start_one_more(self, worker: str) -> None:
        """Raise the limit of the worker's parked `admit` by one, because one of its groups has ended."""
        if parked := self._parked.get(("admit", worker)):
            parked.max_groups += 1

    def _shares(self) -> Mapping[str, int]:
        """Return the number of slots that each worker with a parked `admit` gets now; {} if no slot can be granted."""
        asked = {
            worker: parked.max_groups for (op, worker), parked in self._parked.items()
            if op == "admit" and self._incarnations.get(worker, 1) > self._retired.get(worker, 0)
        }
        if asked and len(self._seen_workers) >= self._fewest_workers and (capacity := self.store.capacity()):
            return fair_shares(capacity, asked, self.store.running_by_worker())
        return {}

    def _reply_to_learner(self, parked: Parked, now_s: float) -> None:
        result: dict[str, Any] = {}
        batch: Sequence[Frame] = ()
        is_push = parked.request.op == "may_push"
        if is_push and self.store.may_push():
            result = {"ready": True}
        elif not is_push and (taken := self.store.take(parked.version, now_s)):
            waited_s = {key: waits.hand_out(parked.version, now_s) for key, waits in self._waits.items()}
            gauges = self.store.state.gauges() | waited_s
            groups = [(row.finished_version, row.payload) for row in taken]
            batch = batch_frames(parked.version, groups, self.counters(), gauges, self.limits)
        elif self.store.end_reason and not (is_push and self.store.state.is_draining):
            # A push that shuts admission waits for running groups alone, and so not for ever.
            result = {"end": self.store.end_reason}
        if not (result or batch):
            if not is_push:
                for key, waits in self._waits.items():
                    if key != LATE or self.store.misses_late:
                        waits.begin(now_s)
            if now_s < parked.until_s:
                return
            result = {"state": self.describe(now_s)}
            for waits in self._waits.values():
                waits.end(now_s)
        del self._parked[LEARNER, ""]
        self._replies.append(Outgoing(parked.identity, [parked.request.id], result, batch=batch))


def fair_shares(capacity: int, asked: Mapping[str, int], running: Mapping[str, int]) -> dict[str, int]:
    """Divide slots among workers, and return each worker's number of slots.

    Each slot goes to the worker that has the fewest groups; if equal, to the first in `asked`. For example, 3 slots
    for two workers that run 2 and 0 groups are divided into 1 and 2.

    Args:
        capacity: the number of slots that may be granted now.
        asked: the most slots that each worker can use.
        running: the number of groups that each worker runs already.
    """
    shares = dict.fromkeys(asked, 0)
    able = [(running.get(worker, 0), place, worker) for place, worker in enumerate(asked) if asked[worker] > 0]
    heapq.heapify(able)
    for _ in range(min(capacity, sum(asked.values()))):
        groups, place, worker = able[0]
        shares[worker] += 1
        if shares[worker] < asked[worker]:
            heapq.heapreplace(able, (groups + 1, place, worker))
        else:
            heapq.heappop(able)
    return shares


class LearnerWaits:
    """Measures how long the learner waits before each batch, for example for any group or for late groups.

    All times are by the buffer's clock.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """The start of the current wait; None: the learner does not wait."""
        self._waited_s = 0.0
        """The sum of the ended waits since the last batch, in seconds."""
        self._handed_out = (-1, 0.0)
        """The version of the last batch, and the seconds that the learner waited before it."""

    def begin(self, now_s: float) -> None:
        """Record the start of a wait. Does nothing during a wait."""
        if self._since_s is None:
            self._since_s = now_s

    def end(self, now_s: float) -> None:
        """Record the end of a wait: the learner was answered, perhaps without a batch. Does nothing without a wait."""
        if self._since_s is not None:
            self._waited_s += now_s - self._since_s
            self._since_s = None

    def hand_out(self, version: int, now_s: float) -> float:
        """End the wait for batch `version`, and return how many seconds the learner waited for this batch.

        If the learner requests the same batch again, the same number is returned.
        """
        self.end(now_s)
        if version != self._handed_out[0]:
            self._handed_out = (version, self._waited_s)
            self._waited_s = 0.0
        return self._handed_out[1]
