"""The buffer's clients: LearnerClient, which blocks, and WorkerClient, which uses asyncio.

A client repeats an unanswered request with the same id, so a lost message costs only time. After timeouts.buffer_s the
request ends with an error that says who waited for what. In a long poll the buffer may delay its answer by up to
wait_s. Each attempt of a long poll therefore takes up to wait_s longer.
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
from buffer.wire import (
    LONG_POLL_S,
    BufferReply,
    decode_batch,
    pack_request,
    read_reply,
    read_slots,
    receive,
)

ATTEMPTS = 4
"""Number of times that a request is sent within timeouts.buffer_s."""


class LearnerClient:
    """Sends the learner's requests to the buffer. Each call blocks until the buffer answers. Not thread-safe.

    Args:
        keys: the folder network.keys; "": connect without keys.

    Raises:
        WaitTimeoutError: from every method, if the buffer does not answer within timeouts.buffer_s.
        WireError: from every method, if the buffer refuses the request.
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
        """Wait for batch number `version`, and return it decoded.

        Raises:
            WaitTimeoutError, NothingToLearnError: as in `take_raw`.
        """
        return decode_batch(self.take_raw(version))

    def take_raw(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> list[memoryview]:
        """Wait for batch number `version`, and return its frames. `decode_batch` decodes them on any learner rank.

        Args:
            interrupted: called every few seconds. If it returns True, the wait ends and the list is empty.

        Raises:
            WaitTimeoutError: there was no batch within timeouts.batch_s. The message says what is missing.
            NothingToLearnError: there will be no further batch.
        """
        reply = self._poll("take", version, f"for batch {version}", interrupted)
        if reply and "end" in reply.result:
            raise NothingToLearnError(reply.result["end"])
        return [frame.buffer for frame in reply.frames] if reply else []

    def await_push(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until the learner may push `version`, its newest version.

        With staleness.mode exact, the push waits until all groups of the served version have arrived. With
        weight_sync.on_update drain, it waits until no group runs, and the buffer grants no slot until `served`. In all
        other cases it need not wait.

        Args:
            interrupted: called every few seconds. If it returns True, the wait ends.

        Raises:
            WaitTimeoutError: the wait exceeded timeouts.batch_s. The message says what is missing.
            NothingToLearnError: in exact mode, there will be no further batch, so the awaited groups never arrive.
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
        """Report that training on the last batch yielded `version`. From now on groups may have tokens of it."""
        self._call("trained", version=version)

    def served(self, version: int) -> None:
        """Report that every live server serves `version`. New groups start with it.

        Call `served(0)` before the first batch: without it the buffer grants no slots.
        """
        self._call("served", version=version)

    def ended(self, version: int) -> None:
        """Report the end of training, before a push of averaged weights. Groups that arrive later are not stored."""
        self._call("ended", version=version)

    def buffer_checkpoint(self, version: int) -> dict[str, Any]:
        """Return the buffer's part of a training checkpoint.

        Args:
            version: the number of batches trained so far.
        """
        return self._call("checkpoint", version=version).result

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _poll(self, op: str, version: int, purpose: str, interrupted: Callable[[], bool]) -> BufferReply | None:
        """Repeat the request `op` until it is fulfilled, and return the reply; None if `interrupted()` returns True.

        Args:
            purpose: what the learner waits for, to complete the error's sentence.

        Raises:
            WaitTimeoutError: the request was not fulfilled within timeouts.batch_s.
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
    """Sends a rollout worker's requests to the buffer. The coroutines of one event loop may share a client.

    Args:
        worker: the worker's name, such as rollout/0. It is unique in the run, and the buffer grants slots to it.
        keys: the folder network.keys; "": connect without keys.
        incarnation: the number of this start of the worker, from 1. Once the buffer knows a later start, it refuses the
            requests of this one.

    Raises:
        WaitTimeoutError: from every method, if the buffer does not answer in time.
        WireError: from every method, if the buffer refuses the request.
    """

    def __init__(
        self, address: str, worker: str, timeouts: TimeoutsConfig, keys: str = "", incarnation: int = 1
    ) -> None:
        self._address = address
        self._worker = worker
        self._incarnation = incarnation
        self._wire_s = timeouts.buffer_s
        self.flat_groups = (0, 0)
        """Two counts of flat groups in a row, over all workers, at the last `put`. In a flat group all answers got the
        same reward. The first number counts flat groups that share one reward, for example only zeros. The second one
        counts flat groups with any rewards."""
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
        """Report the sources of the task's prompts. With task.difficulty, call it before the first `admit`.

        Args:
            sources: a pair (number of prompts, number of prompts in an epoch) for each source.
        """
        told = [[int(size), int(per_epoch)] for size, per_epoch in sources]  # a task may have them of other types
        await self._call(next(self._ids), "prompts", "the numbers of prompts", sources=told)

    async def admit(self, max_groups: int) -> list[Slot]:
        """Wait for slots, and return them, sorted by group id; [] if there are none within LONG_POLL_S seconds.

        Only one call may run at a time. If a call was cancelled, the next call continues it, so that no granted slot is
        lost. That call may return as many slots as the cancelled call asked for.

        Args:
            max_groups: the most slots to return. Each group of this worker that ends during the wait allows one more.
        """
        if self._open_admit is None:
            self._open_admit = next(self._ids)
        reply = await self._call(self._open_admit, "admit", "slots", max_groups=max_groups, wait_s=LONG_POLL_S)
        self._open_admit = None
        return read_slots(reply.result)

    async def aborts(self, acknowledged: Sequence[int]) -> list[int]:
        """Wait until the buffer has dropped groups that this worker runs, and return their ids.

        Returns [] after LONG_POLL_S seconds. The same ids are returned again until the worker acknowledges them.

        Args:
            acknowledged: the ids of groups that the worker has cancelled.
        """
        reply = await self._call(
            next(self._ids), "aborts", "dropped groups", acknowledged=list(acknowledged), wait_s=LONG_POLL_S
        )
        groups: list[int] = reply.result["groups"]
        return groups

    async def put(self, group: Group) -> bool:
        """Deliver a finished group. Returns False if the buffer has stored or dropped the group before, else True.

        Raises:
            WireError: the buffer refuses the group. The group's slot is still in use: call `fail` to free it.
        """
        reply = await self._call(
            next(self._ids), "put", f"group {group.group_id}", encode_group(group), group_id=group.group_id
        )
        same, in_row = reply.result["flat_groups"]
        self.flat_groups = (same, in_row)
        return bool(reply.result["stored"])

    async def fail(self, group_id: int, reason: str, requeue: bool = False, data_row: int = -1) -> None:
        """Give up a running group. The buffer drops the group as failed.

        Args:
            reason: why the group failed.
            requeue: whether its prompt is granted again.
            data_row: the `data_row` of its prompt; -1: not known.
        """
        await self._call(
            next(self._ids), "fail", f"the failure of group {group_id}",
            group_id=group_id, cause=cut_text(reason, MAX_CAUSE_CHARS), requeue=requeue, data_row=data_row,
        )

    async def close(self) -> None:
        """Close the connection. Cancel waiting calls, because they get no answer and raise AsyncRLError later."""
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
    """Return successive request ids from a random start. So a restarted client repeats none of its earlier ids."""
    return itertools.count(secrets.randbits(61))


def _accepted(reply: BufferReply) -> BufferReply:
    if reply.error:
        raise WireError(f"the buffer refused this client's message: {reply.error}")
    return reply


def _unanswered(who: str, request: str, address: str, waited_s: float, poll_s: float) -> WaitTimeoutError:
    """Return the error of a request that got no answer.

    Args:
        who: the client, such as `learner`.
        waited_s: how long the client waited in total.
        poll_s: wait_s of a long poll; 0 for other requests.
    """
    polls = f" and up to {ATTEMPTS} times the {poll_s:.0f} s for which it may wait with its answer" if poll_s else ""
    return WaitTimeoutError(
        f"{who} waited {waited_s:.0f} s (timeouts.buffer_s{polls}) for the buffer at {address} to answer "
        f"{request}, sent {ATTEMPTS} times: the buffer is down, or rejected this client's CURVE keys (network.keys)"
    )
