"""The buffer's socket: one thread, one ROUTER, one poll loop around the store.

    operation   asked by   answered
    admit       worker     with slots as soon as there are some, empty after its wait_s
    put, fail   worker     at once
    dropped     worker     with groups it runs for nothing as soon as there are some, empty after its wait_s
    take        learner    with the batch as soon as the rules allow, with what it waits for after its wait_s
    may_push    learner    as soon as the rules allow, with what it waits for after its wait_s
    trained     learner    at once
    served      learner    at once; parked admits are answered next
    cut         learner    at once, with what a checkpoint keeps of the buffer

A turn of the loop takes what has arrived, then answers who has been waiting, then commits the journal, and only then
sends the answers: whoever got one can rely on it. What arrives is checked before it touches the store. A refused
message changes nothing but `buffer/refused`; its sender gets the reason.
"""

from __future__ import annotations

import dataclasses
import heapq
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.checkpoints import resumed_cut
from async_rl.codec import Fields, Limits, decode_group
from async_rl.config import Config
from async_rl.errors import WaitTimeoutError, WireError
from async_rl.types import RolloutGroup, Slot
from buffer.cut import cut_of, go_on_from
from buffer.door import Door
from buffer.journal import FILE_NAME, Journal
from buffer.staleness import Rules
from buffer.store import Store
from buffer.store_rows import Outcome
from buffer.store_state import StoreState
from buffer.wire import (
    MAX_CAUSE_CHARS,
    MAX_ERROR_CHARS,
    Request,
    batch_frames,
    pack_reply,
    pack_slots,
    read_request,
    read_request_id,
)

STOP_CHECK_S = 0.2
"""How long the loop sleeps at most, as no message announces that `stop` was set."""
MESSAGES_A_TURN = 256
"""Handled before parked requests get their turn."""
MAX_WAIT_S = 60.0
MAX_HEARD = 2**20


@dataclass(frozen=True, slots=True)
class Parked:
    """A long-poll that is waiting for its answer."""

    identity: bytes
    request: Request
    amount: int
    """max_groups of an admit, version of a take or may_push."""
    until_s: float


class BufferServer:
    """The staleness-bounded buffer of one run, at network.host. It goes on from its journal if the run has one already.

    Admission opens when the learner has called `served(0)` and each of placement.rollout.servers workers has asked
    once, so that the first to come does not get all slots. All methods but `serve` may be called from other threads.

    Raises:
        ConfigError: network.host or network.port can't be bound, or network.keys holds no keys.
        AsyncRLError: the journal can't be read or written.
    """

    def __init__(self, config: Config) -> None:
        self._limits = Limits.from_config(config)
        self._workers = [f"rollout/{i}" for i in range(config.placement.rollout.servers)]
        self._shutdown_s = config.timeouts.shutdown_s
        self._drop_equal = config.drops_zero_variance
        self._journal = _open_journal(config)
        self._refused = 0
        self._restarts = 0
        self._last_grant: dict[str, tuple[int, bytes]] = {}  # by worker: request id and reply, should it get lost
        self._seen_workers: set[str] = set()
        self._store = Store(Rules.from_config(config), self._restored_state(config))
        self._lock = threading.Lock()
        self._serving = threading.Lock()
        self._admits: dict[str, Parked] = {}
        self._dropped: dict[str, Parked] = {}
        self._learner: Parked | None = None  # a take or a may_push
        self._outbox: list[list[bytes]] = []
        # Far beyond the largest valid group, which is refused by name, ZMQ cuts the connection.
        self._door = Door(config.network, 2**20 + 4 * self._limits.max_group_bytes)
        self._router = self._door.router
        self.address = self._door.address

    def serve(self, stop: threading.Event) -> None:
        """Answers until `stop` is set; blocks.

        Raises:
            StalenessError: the bound would have been broken: a bug.
            AsyncRLError: the journal can't be written.
        """
        with self._serving:
            while not stop.is_set():
                if self._router.poll(self._sleep_ms()):
                    self._receive()
                with self._lock:
                    self._answer_parked(time.monotonic())
                    self._commit()
                self._send_answers()

    def counters(self) -> dict[str, float]:
        with self._lock:
            return self._counters()

    def describe(self) -> str:
        with self._lock:
            return self._describe(time.monotonic())

    def abandon(self, worker: str) -> int:
        """The worker is gone: its running groups fail, their prompts go to others. Returns the number of groups."""
        with self._lock:
            self._admits.pop(worker, None)
            self._dropped.pop(worker, None)
            return self._store.abandon(worker)

    def close(self) -> dict[str, float]:
        """Ends the account once `serve` has returned: drops what is left as `shutdown`. Returns the last counters.

        Raises:
            StalenessError: groups are unaccounted for.
            WaitTimeoutError: `serve` goes on; its `stop` must be set first.
        """
        if not self._serving.acquire(timeout=self._shutdown_s):
            raise WaitTimeoutError(
                f"buffer: close waited {self._shutdown_s:.0f} s (timeouts.shutdown_s) for serve to return"
            )
        self._serving.release()
        with self._lock:
            self._door.close()
            self._store.close()
            self._commit()
            if self._journal:
                self._journal.close()
            return self._counters()

    def _restored_state(self, config: Config) -> StoreState:
        """As the journal has it, or the checkpoint that the run goes on from; empty in a new run."""
        state = StoreState(record=self._journal.record) if self._journal else StoreState()
        if self._journal and (found := self._journal.load()):
            rows, scalars = found
            state.restore(rows, scalars)
            self._refused, self._restarts = scalars["refused"], scalars["restarts"] + 1
            # A worker that did not hear of its last grant asks again, with the same request id.
            for last in state.rows():
                slots = [row.slot for row in state.running.values() if row.grant == last.grant]
                self._last_grant[last.worker] = (last.grant, pack_reply(last.grant, pack_slots(slots)))
            if state.next_group_id:  # nothing is granted before all have asked
                self._seen_workers.update(self._workers)
        elif cut := resumed_cut(config):
            go_on_from(cut, state)
        return state

    def _commit(self) -> None:
        if self._journal:
            more = {"refused": self._refused, "restarts": self._restarts, "limits": dataclasses.asdict(self._limits)}
            self._journal.commit({**self._store.state.scalars(), **more})

    def _send_answers(self) -> None:
        for frames in self._outbox:
            self._router.send_multipart(frames, copy=False)
        self._outbox.clear()

    def _counters(self) -> dict[str, float]:
        more = {"buffer/refused": float(self._refused), "buffer/restarts": float(self._restarts)}
        return {**self._store.state.counters(), **more}

    def _sleep_ms(self) -> int:
        with self._lock:
            learner = [self._learner] if self._learner else []
            parked = [*self._admits.values(), *self._dropped.values(), *learner]
        until_s = min((p.until_s for p in parked), default=float("inf"))
        return round(1000 * min(STOP_CHECK_S, max(0.0, until_s - time.monotonic()))) + 1

    def _receive(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self.answer(identity, frames)
            if reply is not None:
                self._outbox.append([identity, reply])

    def answer(self, identity: bytes, frames: list[bytes]) -> bytes | None:
        """The reply to one message, whatever it is; None if it is parked."""
        with self._lock:
            try:
                return self._handle(identity, frames)
            except WireError as error:
                self._refused += 1
                return pack_reply(read_request_id(frames), {}, str(error)[:MAX_ERROR_CHARS])

    def _handle(self, identity: bytes, frames: list[bytes]) -> bytes | None:
        request = read_request(frames)
        fields = request.fields
        match request.op:
            case "admit":
                return self._park_admit(identity, request)
            case "dropped":
                self._park_dropped(identity, request)
                return None
            case "take" | "may_push":
                version = fields.integer("version", 0)
                self._store.check_takeable(version)
                self._learner = Parked(identity, request, version, self._until_s(request))
                return None
            case "put":
                return pack_reply(request.id, {"stored": self._put(self._worker(fields), request.payload[0])})
            case "fail":
                worker, group_id = self._worker(fields), fields.integer("group_id", 0)
                cause, requeue = fields.text("cause", MAX_CAUSE_CHARS), fields.boolean("requeue")
                if self._store.running_slot(group_id, worker):
                    self._store.fail(group_id, cause, requeue)
            case "trained":
                self._store.trained(fields.integer("version", 0))
            case "served":
                self._store.served(fields.integer("version", 0))
            case "cut":
                self._store.check_takeable(fields.integer("version", 0))
                return pack_reply(request.id, cut_of(self._store.state))
        return pack_reply(request.id, {})

    def _worker(self, fields: Fields) -> str:
        worker = fields.text("worker")
        if worker not in self._workers:  # a slot granted to nobody would never come back
            raise fields.refuse("worker", f"one of the run's: {', '.join(self._workers)[:200]}")
        return worker

    def _park_admit(self, identity: bytes, request: Request) -> bytes | None:
        worker, max_groups = self._worker(request.fields), request.fields.integer("max_groups", 1, 2**20)
        until_s = self._until_s(request)
        last_id, last_reply = self._last_grant.get(worker, (-1, b""))
        if request.id == last_id:
            return last_reply
        self._seen_workers.add(worker)
        self._admits[worker] = Parked(identity, request, max_groups, until_s)
        return None

    def _park_dropped(self, identity: bytes, request: Request) -> None:
        worker, heard = self._worker(request.fields), request.fields.items("heard", 0, MAX_HEARD)
        if not all(type(group_id) is int for group_id in heard):
            raise request.fields.refuse("heard", "a list of group ids")
        self._store.forget_aborts(worker, heard)
        self._dropped[worker] = Parked(identity, request, 0, self._until_s(request))

    def _until_s(self, request: Request) -> float:
        wait_s = request.fields.number("wait_s", 0.0)
        return time.monotonic() + min(wait_s, MAX_WAIT_S)

    def _put(self, worker: str, payload: bytes) -> bool:
        """Whether the group was stored now: not if it had been before, or was given up."""
        group = decode_group(payload, self._limits)
        slot = self._store.running_slot(group.group_id, worker)
        if slot is None:
            return False
        self._check_slot(group, slot)
        self._store.finish(group.group_id, payload, Outcome.of(group), self._drop_equal)
        if self._journal:
            self._journal.describe(group)
        return True

    def _check_slot(self, group: RolloutGroup, slot: Slot) -> None:
        for field in ("prompt_index", "start_version"):
            got, granted = getattr(group, field), getattr(slot, field)
            if got != granted:
                raise WireError(f"{field}: got {got}, allowed {granted} as granted to group {slot.group_id}")
        announced = self._store.state.version
        if group.newest_version > announced:
            raise WireError(f"versions: got {group.newest_version}, allowed at most {announced}, the newest announced")

    def _answer_parked(self, now_s: float) -> None:
        if self._learner:
            self._answer_learner(self._learner, now_s)
        for worker, parked in list(self._dropped.items()):
            if (groups := self._store.aborts(worker)) or parked.until_s <= now_s:
                del self._dropped[worker]
                self._outbox.append([parked.identity, pack_reply(parked.request.id, {"groups": groups})])
        shares: Mapping[str, int] = {}
        if self._admits and len(self._seen_workers) == len(self._workers) and (capacity := self._store.capacity()):
            asked = {worker: parked.amount for worker, parked in self._admits.items()}
            shares = fair_shares(capacity, asked, self._store.running_by_worker())
        for worker, parked in list(self._admits.items()):
            if shares.get(worker) or parked.until_s <= now_s:
                slots = self._store.admit(worker, shares.get(worker, 0), now_s, grant=parked.request.id)
                reply = pack_reply(parked.request.id, pack_slots(slots))
                self._last_grant[worker] = (parked.request.id, reply)
                del self._admits[worker]
                self._outbox.append([parked.identity, reply])

    def _answer_learner(self, parked: Parked, now_s: float) -> None:
        result: dict[str, Any] = {}
        frames: list[bytes] = []
        if parked.request.op == "may_push":
            result = {"ready": True} if self._store.may_push() else {}
        elif taken := self._store.take(parked.amount, now_s):
            frames = batch_frames(taken, self._counters(), self._limits)
        elif self._store.ended:
            result = {"end": self._store.ended}
        if not (result or frames):
            if now_s < parked.until_s:
                return
            result = {"state": self._describe(now_s)}
        self._learner = None
        self._outbox.append([parked.identity, pack_reply(parked.request.id, result), *frames])

    def _describe(self, now_s: float) -> str:
        missing = len(self._workers) - len(self._seen_workers)
        if missing > 0:
            return f"{missing} of {len(self._workers)} rollout workers have not asked for prompts yet"
        return self._store.describe(now_s)


def _open_journal(config: Config) -> Journal | None:
    if not config.buffer.journal:
        return None
    return Journal(config.run_dir / FILE_NAME, config.buffer.journal_keep_steps)


def fair_shares(capacity: int, asked: Mapping[str, int], running: Mapping[str, int]) -> dict[str, int]:
    """How many groups each worker is granted: one at a time to whom has the fewest running, up to what it asked for."""
    shares = dict.fromkeys(asked, 0)
    order = {worker: position for position, worker in enumerate(asked)}
    queue = [(running.get(worker, 0), order[worker], worker) for worker in asked]
    heapq.heapify(queue)
    for _ in range(min(capacity, sum(asked.values()))):
        load, position, worker = heapq.heappop(queue)
        shares[worker] += 1
        if shares[worker] < asked[worker]:
            heapq.heappush(queue, (load + 1, position, worker))
    return shares
