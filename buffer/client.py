"""Defines the buffer's clients: one for the learner, which blocks, and one for a rollout worker, with asyncio.

A request without an answer is repeated with the same id, so a lost message costs time and nothing else; after
timeouts.buffer_s the wait ends with an error that says who waited for what. A request that lets the buffer wait with
its answer waits that much longer, each time it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from async_rl.base.config import TimeoutsConfig
from async_rl.base.errors import AsyncRLError, NothingToLearnError, WaitTimeoutError, WireError
from async_rl.base.messages.codec import encode_group
from async_rl.base.messages.fields import cut_text
from async_rl.base.types import MAX_CAUSE_CHARS, Batch, Group, Slot
from buffer.keys import use_client_keys
from buffer.stored_group import receive
from buffer.wire import (
    LONG_POLL_S,
    BufferReply,
    decode_batch,
    pack_request,
    read_reply,
    read_slots,
)

ATTEMPTS = 4
"""Number of times that a request is sent within timeouts.buffer_s."""


class LearnerClient:
    """Sends the learner's requests. Each call blocks until the buffer answers; only one thread may use it.

    Every method raises WaitTimeoutError if the buffer does not answer within timeouts.buffer_s, and WireError if it
    refuses the request. `keys` is the folder network.keys; "" connects without keys.
    """

    def __init__(self, address: str, timeouts: TimeoutsConfig, keys: str = "") -> None:
        self._address = address
        self._timeouts = timeouts
        self._ids = _request_ids()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0  # else the end of the process, or a collection, would wait for what no peer reads
        use_client_keys(self._socket, keys)
        self._socket.sndtimeo = math.ceil(1000 * timeouts.buffer_s / ATTEMPTS)
        self._socket.connect(address)

    def take(self, version: int) -> Batch:
        """Wait for batch number `version` and return it decoded. Raises the same errors as `take_raw`."""
        return decode_batch(self.take_raw(version))

    def take_raw(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> list[memoryview]:
        """Wait for batch number `version` and return its frames, for `decode_batch` here or on another rank.

        The list is empty if `interrupted`, asked every few seconds, returns True before there is a batch.

        Raises:
            WaitTimeoutError: there was no batch within timeouts.batch_s; the message says what is missing.
            NothingToLearnError: there will be no further batch.
        """
        reply = self._poll("take", version, f"for batch {version}", interrupted)
        if reply and "end" in reply.result:
            raise NothingToLearnError(reply.result["end"])
        return [frame.buffer for frame in reply.frames] if reply else []

    def await_push(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until `version`, the newest, may be pushed, or `interrupted`, asked every few seconds, returns True.

        In exact mode that is when all groups of the served version have arrived. With `weight_sync.on_update: drain` it
        is when no group runs, and no slot is granted until `served`. Otherwise it is made immediately.

        Raises:
            WaitTimeoutError: it may not be pushed within timeouts.batch_s; the message says what is missing.
            NothingToLearnError: in exact mode, there will be no further batch, so the groups waited for never come.
        """
        purpose = (
            f"to push version {version}, which with staleness.mode exact waits until all groups of the served version "
            "have arrived, and with weight_sync.on_update drain until no group runs (with in_place, retract and abort "
            "it waits for none)"
        )
        reply = self._poll("may_push", version, purpose, interrupted)
        if reply and "end" in reply.result:
            raise NothingToLearnError(reply.result["end"])

    def trained(self, version: int) -> None:
        """Report that the batch taken last yielded `version`; the buffer accepts tokens of this version from now on."""
        self._call("trained", version=version)

    def served(self, version: int) -> None:
        """Report that every live server serves `version`: new groups start with it. `served(0)` opens admission."""
        self._call("served", version=version)

    def buffer_checkpoint(self, version: int) -> dict[str, Any]:
        """Return the buffer's part of a training checkpoint. `version` must be the number of batches trained so far."""
        return self._call("checkpoint", version=version).result

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _poll(self, op: str, version: int, purpose: str, interrupted: Callable[[], bool]) -> BufferReply | None:
        """Repeat the request `op` until it is fulfilled, and return the answer; None once `interrupted()` is True.

        Raises WaitTimeoutError after timeouts.batch_s, which says what the learner waited for: `purpose`.
        """
        limit, start_s = self._timeouts.limit("batch_s"), time.monotonic()
        while not interrupted():
            left_s = limit.seconds - (time.monotonic() - start_s)
            reply = self._call(op, version=version, wait_s=min(LONG_POLL_S, max(0.0, left_s)))
            if "state" not in reply.result:
                return reply
            if time.monotonic() - start_s >= limit.seconds:
                raise WaitTimeoutError(f"the learner waited {limit} {purpose}: {reply.result['state']}")
        return None

    def _call(self, op: str, **fields: Any) -> BufferReply:
        request_id = next(self._ids)
        message = pack_request(op, request_id, **fields)
        wait_s = fields.get("wait_s", 0.0)
        start_s = time.monotonic()
        for _ in range(ATTEMPTS):
            try:
                self._socket.send(message)
            except zmq.Again:  # there is no connection to send it on
                continue
            retry_s = time.monotonic() + wait_s + self._timeouts.buffer_s / ATTEMPTS
            while self._socket.poll(max(0, math.ceil(1000 * (retry_s - time.monotonic())))):
                reply = read_reply(receive(self._socket))
                if request_id in reply.ids:
                    return _accepted(reply)
        raise _unanswered("learner", f"`{op}` ({fields})", self._address, time.monotonic() - start_s, wait_s)


class WorkerClient:
    """Sends a rollout worker's requests. Any number of coroutines of one event loop may use it together.

    Slots are granted to the name `worker`, which is unique in the run. `keys` is the folder network.keys, "" for none.
    `incarnation` is the number of the start of this worker. The buffer refuses a worker that has been started again.
    Every method raises WaitTimeoutError if the buffer does not answer in time, and WireError if it refuses the request.
    """

    def __init__(
        self, address: str, worker: str, timeouts: TimeoutsConfig, keys: str = "", incarnation: int = 1
    ) -> None:
        self._address = address
        self._worker = worker
        self._incarnation = incarnation
        self._wire_s = timeouts.buffer_s
        self.flat_groups = (0, 0)
        """Two counts of groups in a row, of all workers, at the last `put`. The first counts groups whose answers all
        had the same reward, for example only zeros; the second counts groups with one reward each, whichever it was."""
        self._ids = _request_ids()
        self._pending: dict[int, asyncio.Future[BufferReply]] = {}
        self._open_admit: int | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        use_client_keys(self._socket, keys)
        self._socket.connect(address)

    async def tell_prompts(self, sources: Sequence[tuple[int, int]]) -> None:
        """Tell the (size, per epoch) of each source of prompts; with task.difficulty it precedes the first `admit`."""
        told = [[int(size), int(per_epoch)] for size, per_epoch in sources]  # a task may have them of other types
        await self._call(next(self._ids), "prompts", "the numbers of prompts", sources=told)

    async def admit(self, max_groups: int) -> list[Slot]:
        """Wait until there are slots, and return up to `max_groups`, sorted by group id; [] after LONG_POLL_S seconds.

        Only one call may run at a time. The call after a cancelled one continues it, so that no granted slot is lost;
        it may return as many slots as the cancelled call asked for.
        """
        if self._open_admit is None:
            self._open_admit = next(self._ids)
        reply = await self._call(self._open_admit, "admit", "slots", max_groups=max_groups, wait_s=LONG_POLL_S)
        self._open_admit = None
        return read_slots(reply.result)

    async def aborts(self, acknowledged: Sequence[int]) -> list[int]:
        """Wait until the buffer has dropped groups that this worker runs, and return their ids; [] after LONG_POLL_S.

        Ids are returned again until a later call gives them back as `acknowledged`: the worker has cancelled them.
        """
        reply = await self._call(
            next(self._ids), "aborts", "dropped groups", acknowledged=list(acknowledged), wait_s=LONG_POLL_S
        )
        groups: list[int] = reply.result["groups"]
        return groups

    async def put(self, group: Group) -> bool:
        """Deliver a finished group; return False if the buffer had it already or has dropped it, else True.

        If this raises WireError, because the buffer refuses the group, its slot is still held: see `fail`.
        """
        reply = await self._call(next(self._ids), "put", f"group {group.group_id}", encode_group(group))
        same, in_row = reply.result["flat_groups"]
        self.flat_groups = (same, in_row)
        return bool(reply.result["stored"])

    async def fail(self, group_id: int, reason: str, requeue: bool = False, data_row: int = -1) -> None:
        """Give up a running group: it is dropped as failed. With `requeue` its prompt is granted again.

        Args:
            data_row: the `data_row` of its prompt.
        """
        await self._call(
            next(self._ids), "fail", f"the failure of group {group_id}",
            group_id=group_id, cause=cut_text(reason, MAX_CAUSE_CHARS), requeue=requeue, data_row=data_row,
        )

    async def close(self) -> None:
        """End the connection.

        Calls that still wait get no answer: cancel them, or they raise AsyncRLError after their wait.
        """
        if self._receiver:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self._socket.close()
        self._context.term()

    async def _call(self, request_id: int, op: str, subject: str, *payload: bytes, **fields: Any) -> BufferReply:
        if self._receiver is None:
            self._receiver = asyncio.create_task(self._receive())
        message = [pack_request(op, request_id, worker=self._worker, incarnation=self._incarnation, **fields), *payload]
        wait_s = fields.get("wait_s", 0.0)
        future = self._pending[request_id] = asyncio.get_running_loop().create_future()
        start_s = time.monotonic()
        try:
            for _ in range(ATTEMPTS):
                if self._socket.closed:
                    raise AsyncRLError(f"{self._worker}: the connection was closed before the answer to {op} {subject}")
                async with asyncio.timeout(self._wire_s):
                    await self._socket.send_multipart(message, copy=False)
                await asyncio.wait((future,), timeout=wait_s + self._wire_s / ATTEMPTS)
                if future.done():
                    return _accepted(future.result())
        except TimeoutError:
            pass
        finally:
            del self._pending[request_id]
        raise _unanswered(self._worker, f"`{op}` ({subject})", self._address, time.monotonic() - start_s, wait_s)

    async def _receive(self) -> None:
        while True:
            try:
                reply = read_reply(await self._socket.recv_multipart(copy=False))
            except WireError as error:
                for future in self._pending.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            for request_id in reply.ids:
                waiting = self._pending.get(request_id)  # None: this is the second answer to a repeated request
                if waiting and not waiting.done():
                    waiting.set_result(reply)


def _request_ids() -> itertools.count[int]:
    """Return endless ids from a random start, so that a restarted client repeats no id of its earlier requests."""
    return itertools.count(secrets.randbits(61))


def _accepted(reply: BufferReply) -> BufferReply:
    if reply.error:
        raise WireError(f"the buffer refused this client's message: {reply.error}")
    return reply


def _unanswered(who: str, request: str, address: str, waited_s: float, poll_s: float) -> WaitTimeoutError:
    """Return the error of a request that got no answer.

    Args:
        poll_s: how long the request let the buffer wait with its answer, each time it was sent.
    """
    polls = f" and up to {ATTEMPTS} times the {poll_s:.0f} s for which it may wait with its answer" if poll_s else ""
    return WaitTimeoutError(
        f"{who} waited {waited_s:.0f} s (timeouts.buffer_s{polls}) for the buffer at {address} to answer "
        f"{request}, sent {ATTEMPTS} times: the buffer is down, or rejected this client's CURVE keys (network.keys)"
    )
