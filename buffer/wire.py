"""Packs and reads the messages between the buffer and its clients: a msgpack header frame, then raw frames.

    request   {schema, op, id, ...}              put: 1 frame, the group
    reply     {schema, ids, error, result}       take: the frames of a batch, or none while the learner has to wait

A request is repeated with the same id until its reply arrives; the buffer carries it out only once. Requests of
one client with the same answer may be answered together, as requests `put` often are.

Every request of a worker carries `incarnation`, the number of the start of its server. Once the buffer has heard of a
later start, it refuses the requests of an earlier one: a server that was cut off, and was replaced, gets no slots.

    admit       A worker asks for slots. The answer comes as soon as there are some, and is empty after wait_s. For each
                group that it ends meanwhile it may get one more.
    prompts     Before it asks for slots, a worker reports how many prompts each source of the task has, and how many of
                them an epoch has: {sources: [[size, per epoch], ...]}. The answer is immediate.
    put, fail   A worker delivers a finished group, or gives one up with the cause and the row of its prompt. The answer
                comes at once. For a group it is {stored: whether it was new, flat_groups: [how many groups in a row,
                of all workers, had one and the same reward for every answer, how many had one reward each]}.
    aborts      A worker asks for the groups that were dropped while it runs them (staleness.on_late: drop). The answer
                {groups: ids} comes as soon as there are some, and is empty after wait_s. The worker cancels them and
                sends their ids as {acknowledged: ids} with its next request; until then they are listed again.
    take        The learner asks for a batch. Without frames the answer is {state: what the batch waits for}, after
                wait_s, or {end: why}: there will be no further batch, so the learner saves and ends.
    may_push    The learner asks before it pushes `version`. The answer is {ready: true} as soon as it may, and
                {state: the cause of the wait} after wait_s. It has to wait only in exact mode or with on_update:
                drain. In exact mode the answer may be {end: why}: the groups that it waits for would all be dropped.
    trained, served, checkpoint   The learner reports a version, or asks for the buffer's part of a checkpoint. The
                answer is immediate. With `served` it may move the number of slots, and says why: the move is in the
                journal before the answer is sent. -1 slots: their number stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import SCHEMA_VERSION, decode_group
from async_rl.base.messages.fields import MAX_INT, Fields, pack, refusal, unpack
from async_rl.base.messages.limits import Limits
from async_rl.base.types import Batch, Slot
from buffer.stored_group import Frame, StoredGroup, view

LONG_POLL_S = 5.0
"""The longest wait_s that a client sends. A request that can't be fulfilled by then gets an empty answer, and the
client sends it again."""
MAX_ERROR_CHARS = 2000
MAX_ANSWERED = 256
"""The most requests that one reply may answer."""

_OPERATIONS = {
    "admit": ("worker", "incarnation", "max_groups", "wait_s"),
    "prompts": ("worker", "incarnation", "sources"),
    "put": ("worker", "incarnation"),
    "fail": ("worker", "incarnation", "group_id", "cause", "requeue", "data_row"),
    "aborts": ("worker", "incarnation", "acknowledged", "wait_s"),
    "take": ("version", "wait_s"),
    "may_push": ("version", "wait_s"),
    "trained": ("version",),
    "served": ("version",),
    "checkpoint": ("version",),
}
_REQUEST_FIELDS = {op: frozenset(("schema", "op", "id", *names)) for op, names in _OPERATIONS.items()}
_REPLY_FIELDS = frozenset(("schema", "ids", "error", "result"))
_MAX_VERSION = 2**31 - 1
_MAX_BATCH = 2**20


class Request(NamedTuple):
    op: str
    id: int
    fields: Fields
    payload: Sequence[Frame]


class BufferReply(NamedTuple):
    ids: list[int]
    """Ids of the requests of one client that the reply answers."""
    error: str
    """Empty, or why the request was refused."""
    result: dict[str, Any]
    frames: list[zmq.Frame]


def pack_request(op: str, request_id: int, **fields: Any) -> bytes:
    return pack({"schema": SCHEMA_VERSION, "op": op, "id": request_id, **fields})


def read_request(frames: Sequence[Frame]) -> Request:
    """Return the request in the frames of a message. Raises WireError if they are not a request."""
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
    """Return the request id of a message that may be broken, to refuse it to its sender; 0: it has none."""
    try:
        header = unpack(view(frames[0])) if frames else None
    except WireError:
        return 0
    request_id = header.get("id") if isinstance(header, dict) else None
    return request_id if type(request_id) is int and 0 <= request_id <= MAX_INT else 0


def pack_reply(ids: Sequence[int], result: dict[str, Any], error: str = "") -> bytes:
    return pack({"schema": SCHEMA_VERSION, "ids": ids, "error": error, "result": result})


def read_reply(frames: list[zmq.Frame]) -> BufferReply:
    """Return the reply in the frames of a message. Raises WireError if they are not a reply."""
    fields = Fields(unpack(frames[0].buffer), _REPLY_FIELDS, "reply ")
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    ids, error = fields.items("ids", 1, MAX_ANSWERED), fields.text("error", MAX_ERROR_CHARS)
    return BufferReply(ids, error, fields.nested("result"), frames[1:])


def pack_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    return {"slots": [[slot.group_id, slot.prompt_index, slot.start_version] for slot in slots]}


def read_slots(result: dict[str, Any]) -> list[Slot]:
    return [Slot(group_id=g, prompt_index=p, start_version=s) for g, p, s in result["slots"]]


def batch_frames(
    version: int, groups: Sequence[StoredGroup], counters: Mapping[str, float], gauges: Mapping[str, float],
    limits: Limits,
) -> list[Frame]:
    """Return batch number `version` as frames, which `decode_batch` reads on any rank of the learner.

    A counter that is also in `gauges` is sent as a gauge alone.
    """
    header = {
        "version": version,
        "finished_versions": [group.finished_version for group in groups],
        "counters": {key: value for key, value in counters.items() if key not in gauges},
        "gauges": dict(gauges),
        "limits": dataclasses.asdict(limits),
    }
    return [pack(header), *(group.payload for group in groups)]


def decode_batch(frames: Sequence[bytes | memoryview]) -> Batch:
    """Return the batch in the frames of `LearnerClient.take_raw`. Raises WireError if a frame is not valid."""
    fields = Fields(unpack(frames[0]), ("version", "finished_versions", "counters", "gauges", "limits"), "batch ")
    sizes = fields.nested("limits")
    size_fields = Fields(sizes, (f.name for f in dataclasses.fields(Limits)), "batch limits.")
    flags = {name for name in sizes if name.startswith("needs_")}
    read: dict[str, Any] = {
        name: size_fields.boolean(name) if name in flags else size_fields.integer(name, 0) for name in sizes
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
