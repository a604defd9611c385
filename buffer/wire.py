"""The messages between the buffer and its clients, and the functions that pack and read them.

A message is a msgpack header frame, then raw frames. A `put` is followed by the group, an answer to `take` by a batch.

    request   {schema, op, id} and the fields of the operation
    reply     {schema, ids, error, result}

A client repeats a request with the same id until the reply arrives; the buffer carries it out only once. One reply may
answer several requests of a client if their answers are equal. For example, requests `put` often share a reply.

Every request of a worker has the field `incarnation`, the number of the start of its server. The buffer refuses a
request with a lower number than it has seen. So a server that was replaced gets no slots, even if it still runs.

    admit        A worker requests slots. While it waits, each of its groups that ends allows one slot more.
    prompts      A worker reports the sources of its prompts, before its first `admit`. {sources} has a pair for each
                 source: the number of prompts, and the number of prompts in an epoch.
    put          A worker delivers a finished group; by the id in the header a repeat is known before it is read. The
                 result is {stored, flat_groups}: whether the group was new, and the counts described at
                 WorkerClient.flat_groups.
    fail         A worker gives up a running group, with the cause and the row of its prompt.
    aborts       A worker requests the ids of dropped groups that it still runs (staleness.on_late: drop). The result is
                 {groups}. The worker cancels these groups and lists them as {acknowledged} in its next request. Until
                 then each result lists them again.
    take         The learner requests a batch. A reply without a batch has the result {state}, what the batch waits for,
                 or {end}, why there will be no further batch. After {end} the learner saves and ends.
    may_push     The learner asks whether it may push `version`. The result is {ready: true}, or {state}, what the push
                 waits for. The push waits only in exact mode or with weight_sync.on_update: drain. In exact mode the
                 result may be {end}: the groups that the push waits for would all be dropped.
    trained      The learner reports its new version.
    served       The learner reports the version that all servers serve.
    ended        The learner has trained its last batch, and will push the average of its weights (learner.ema_decay).
                 Groups that arrive later are not stored, as they may have tokens of it.
    checkpoint   The learner requests the buffer's part of a checkpoint.

admit, aborts, take and may_push are long polls: they are answered when there is something to report, at the latest
after wait_s. The other requests are answered immediately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import SCHEMA_VERSION, decode_group
from async_rl.base.messages.fields import MAX_INT, Fields, Limits, pack, refusal, unpack
from async_rl.base.types import Batch, Slot

LONG_POLL_S = 5.0
"""The longest wait_s that a client sends, in seconds. A request that can't be fulfilled by then gets an empty answer,
and the client sends it again."""
MAX_ERROR_CHARS = 2000
MAX_ANSWERED = 256
"""The most requests that one reply may answer."""

_OPERATIONS = {
    "admit": ("worker", "incarnation", "max_groups", "wait_s"),
    "prompts": ("worker", "incarnation", "sources"),
    "put": ("worker", "incarnation", "group_id"),
    "fail": ("worker", "incarnation", "group_id", "cause", "requeue", "data_row"),
    "aborts": ("worker", "incarnation", "acknowledged", "wait_s"),
    "take": ("version", "wait_s"),
    "may_push": ("version", "wait_s"),
    "trained": ("version",),
    "served": ("version",),
    "ended": ("version",),
    "checkpoint": ("version",),
}
_REQUEST_FIELDS = {op: frozenset(("schema", "op", "id", *names)) for op, names in _OPERATIONS.items()}
_REPLY_FIELDS = frozenset(("schema", "ids", "error", "result"))
_MAX_VERSION = 2**31 - 1
_MAX_BATCH = 2**20
Frame = bytes | zmq.Frame
"""One part of a ZMQ message. A large one stays in the memory that ZMQ received it in, and is sent on from there."""


class Request(NamedTuple):
    """A client's request, as `read_request` returns it."""

    op: str
    id: int
    fields: Fields
    payload: Sequence[Frame]
    """The group of a `put`; empty for other operations."""


class BufferReply(NamedTuple):
    """The buffer's reply to one client, as `read_reply` returns it."""

    ids: list[int]
    """Ids of the requests that the reply answers."""
    error: str
    """Why the request was refused; empty if it was accepted."""
    result: dict[str, Any]
    frames: list[zmq.Frame]
    """The batch, in the answer to a `take`; otherwise empty."""


def view(frame: Frame) -> memoryview:
    """Return the bytes of a frame without copying them."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Wait for a message and return its frames. With zmq.NOBLOCK in `flags`, raise zmq.Again if there is no message.

    This is faster than recv_multipart, which asks the socket after each frame for more.
    """
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(flags, copy=False))
    return frames


def pack_request(op: str, request_id: int, **fields: Any) -> bytes:
    return pack({"schema": SCHEMA_VERSION, "op": op, "id": request_id, **fields})


def read_request(frames: Sequence[Frame]) -> Request:
    """Return the request in the frames of a message.

    Raises:
        WireError: the frames are not a valid request.
    """
    if not frames:
        raise WireError("message: 0 frames, allowed 1 (a header), or 2 for put (a header and a group)")
    header = unpack(view(frames[0]))
    op = header.get("op") if isinstance(header, dict) else None
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise refusal("op", op if isinstance(header, dict) else header, f"one of {', '.join(_OPERATIONS)}")
    fields = Fields(header, _REQUEST_FIELDS[op])
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    num_payload = 1 if op == "put" else 0
    if len(frames) != 1 + num_payload:
        raise WireError(f"message: {len(frames)} frames, allowed {1 + num_payload} for {op}")
    return Request(op, fields.integer("id", 0), fields, frames[1:])


def read_request_id(frames: Sequence[Frame]) -> int:
    """Return the request id of a message, even if the rest is invalid, for the refusal; 0 if there is none."""
    try:
        header = unpack(view(frames[0])) if frames else None
    except WireError:
        return 0
    request_id = header.get("id") if isinstance(header, dict) else None
    return request_id if type(request_id) is int and 0 <= request_id <= MAX_INT else 0


def pack_reply(ids: Sequence[int], result: dict[str, Any], error: str = "") -> bytes:
    return pack({"schema": SCHEMA_VERSION, "ids": ids, "error": error, "result": result})


def read_reply(frames: list[zmq.Frame]) -> BufferReply:
    """Return the reply in the frames of a message.

    Raises:
        WireError: the frames are not a valid reply.
    """
    fields = Fields(unpack(frames[0].buffer), _REPLY_FIELDS, "reply ")
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    ids, error = fields.items("ids", 1, MAX_ANSWERED), fields.text("error", MAX_ERROR_CHARS)
    return BufferReply(ids, error, fields.nested("result"), frames[1:])


def pack_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    return {"slots": [[slot.group_id, slot.prompt_index, slot.start_version] for slot in slots]}


def read_slots(result: dict[str, Any]) -> list[Slot]:
    return [Slot(group_id=g, prompt_index=p, start_version=s) for g, p, s in result["slots"]]


def batch_frames(
    version: int, groups: Sequence[tuple[int, Frame]], counters: Mapping[str, float], gauges: Mapping[str, float],
    limits: Limits,
) -> list[Frame]:
    """Encode batch number `version` as frames. `decode_batch` decodes them on any learner rank.

    A counter that is also in `gauges` is sent only as a gauge.

    Args:
        groups: of each group the served version when it arrived, and the encoded group.
    """
    header = {
        "version": version,
        "finished_versions": [finished_version for finished_version, _ in groups],
        "counters": {key: value for key, value in counters.items() if key not in gauges},
        "gauges": dict(gauges),
        "limits": dataclasses.asdict(limits),
    }
    return [pack(header), *(payload for _, payload in groups)]


def decode_batch(frames: Sequence[bytes | memoryview]) -> Batch:
    """Decode the frames that `LearnerClient.take_raw` returns, and return the batch.

    Raises:
        WireError: a frame is invalid.
    """
    fields = Fields(unpack(frames[0]), ("version", "finished_versions", "counters", "gauges", "limits"), "batch ")
    sizes = fields.nested("limits")
    size_fields = Fields(sizes, (f.name for f in dataclasses.fields(Limits)), "batch limits.")
    read: dict[str, Any] = {
        name: size_fields.boolean(name) if name.startswith("needs_") else size_fields.integer(name, 0) for name in sizes
    }
    limits = Limits(**read)
    finished = fields.items("finished_versions", 0, _MAX_BATCH)
    if len(finished) != len(frames) - 1:
        raise WireError(f"batch: {len(frames) - 1} groups, allowed {len(finished)} as its header says")
    return Batch(
        version=fields.integer("version", 0, _MAX_VERSION),
        groups=tuple(decode_group(data, limits) for data in frames[1:]),
        finished_versions=tuple(finished),
        counters=fields.nested("counters"),
        gauges=fields.nested("gauges"),
    )
