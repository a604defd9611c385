"""The messages between the buffer and its clients: a msgpack header frame, then raw frames.

    request   {schema, op, id, ...}              put: 1 frame, the group
    reply     {schema, ids, error, result}       take: the frames of a batch, or none while it has to wait

A request is repeated with the same id until its reply arrives; the buffer makes the second one harmless. Requests of
one client that have the same answer, as many a `put` has, may be answered together.

    dropped     asked by a worker: {heard: ids}, answered {groups: ids} as soon as groups it runs were dropped without
                its doing (staleness.late: drop), empty after wait_s. It cancels these, which aborts them at the engine,
                and names them as heard in its next request: until then they are named again.
    may_push    asked by the learner before it pushes `version`, answered {ready: true} as soon as it may, {state: what
                it waits for} after wait_s. It may at once but in exact mode and with weight_sync.on_update: drain.
    take        {end: why} without frames: there will be no batch any more, the learner saves and ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.errors import WireError
from async_rl.messages.codec import SCHEMA_VERSION, Limits, decode_group
from async_rl.messages.message_reader import MAX_INT, Fields, pack, refusal, unpack
from async_rl.types import Batch, Slot
from buffer.frames import Frame, view
from buffer.store_rows import Row

LONG_POLL_S = 5.0
"""An `admit` or `take` that nothing can be given to is answered empty after this long, and asked again."""
MAX_CAUSE_CHARS = 2000
MAX_ERROR_CHARS = 2000
MAX_ANSWERED = 256
"""Requests that one reply may answer."""

_OPERATIONS = {
    "admit": ("worker", "max_groups", "wait_s"),
    "put": ("worker",),
    "fail": ("worker", "group_id", "cause", "requeue"),
    "dropped": ("worker", "heard", "wait_s"),
    "take": ("version", "wait_s"),
    "may_push": ("version", "wait_s"),
    "trained": ("version",),
    "served": ("version",),
    "cut": ("version",),
}
_REQUEST_FIELDS = {op: frozenset(("schema", "op", "id", *names)) for op, names in _OPERATIONS.items()}
_REPLY_FIELDS = frozenset(("schema", "ids", "error", "result"))
_MAX_VERSION = 2**31 - 1
_MAX_BATCH = 2**20


@dataclass(slots=True)
class Request:
    op: str
    id: int
    fields: Fields
    payload: Sequence[Frame]


@dataclass(slots=True)
class Reply:
    ids: list[int]
    """Of the requests it answers."""
    error: str
    """Empty, or why the request was refused."""
    result: dict[str, Any]
    frames: list[zmq.Frame]


def pack_request(op: str, request_id: int, **fields: Any) -> bytes:
    return pack({"schema": SCHEMA_VERSION, "op": op, "id": request_id, **fields})


def read_request(frames: Sequence[Frame]) -> Request:
    """
    Raises:
        WireError: not a request; names the field and the value.
    """
    if not frames:
        raise WireError("message: 0 frames, allowed a header and its payload")
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
    """Of a message that may be broken, so that its refusal finds its sender's wait; 0 if there is none."""
    try:
        header = unpack(view(frames[0])) if frames else None
    except WireError:
        return 0
    request_id = header.get("id") if isinstance(header, dict) else None
    return request_id if type(request_id) is int and 0 <= request_id <= MAX_INT else 0


def pack_reply(ids: Sequence[int], result: dict[str, Any], error: str = "") -> bytes:
    return pack({"schema": SCHEMA_VERSION, "ids": ids, "error": error, "result": result})


def read_reply(frames: list[zmq.Frame]) -> Reply:
    """
    Raises:
        WireError: not a reply.
    """
    fields = Fields(unpack(frames[0].buffer), _REPLY_FIELDS, "reply ")
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    ids, error = fields.items("ids", 1, MAX_ANSWERED), fields.text("error", MAX_ERROR_CHARS)
    return Reply(ids, error, fields.nested("result"), frames[1:])


def pack_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    return {"slots": [[slot.group_id, slot.prompt_index, slot.start_version] for slot in slots]}


def read_slots(result: dict[str, Any]) -> list[Slot]:
    return [Slot(group_id=g, prompt_index=p, start_version=s) for g, p, s in result["slots"]]


def batch_frames(version: int, groups: Sequence[Row], counters: dict[str, float], limits: Limits) -> list[Frame]:
    """Batch number `version` as it travels to the learner, and from its rank 0 to the others; decodes by itself."""
    header = {
        "version": version,
        "finished_versions": [group.finished_version for group in groups],
        "counters": counters,
        "limits": dataclasses.asdict(limits),
    }
    return [pack(header), *(group.payload for group in groups)]


def decode_batch(frames: Sequence[bytes | memoryview]) -> Batch:
    """The batch of `LearnerClient.take_raw`'s frames.

    Raises:
        WireError: names the field and the value.
    """
    fields = Fields(unpack(frames[0]), ("version", "finished_versions", "counters", "limits"), "batch ")
    sizes = fields.nested("limits")
    size_fields = Fields(sizes, (f.name for f in dataclasses.fields(Limits)), "batch limits.")
    limits = Limits(**{name: size_fields.integer(name, 1) for name in sizes})
    finished = fields.items("finished_versions", 0, _MAX_BATCH)
    if len(finished) != len(frames) - 1:
        raise WireError(f"batch: {len(frames) - 1} groups, allowed {len(finished)} as its header says")
    return Batch(
        version=fields.integer("version", 0, _MAX_VERSION),
        groups=tuple(decode_group(data, limits) for data in frames[1:]),
        finished_versions=tuple(finished),
        counters=fields.nested("counters"),
    )
