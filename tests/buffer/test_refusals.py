"""Real sockets: a buffer and clients that send invalid messages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from async_rl.base.errors import WireError
from buffer.client import LearnerClient, WorkerClient
from buffer.server import BufferServer
from buffer.wire import pack_request
from tests.kit.buffer.clients import FIRST, ask, put_frames, with_worker
from tests.kit.groups import make_group, make_row

PUT = pack_request("put", 77, worker="rollout/0", incarnation=1, group_id=0)
OTHER_PROMPT = dataclasses.replace(FIRST, prompt_index=3)
OTHER_START = dataclasses.replace(FIRST, start_version=1)
FAILED = {"worker": "rollout/0", "incarnation": 1, "group_id": 0, "cause": "", "requeue": False, "data_row": 0}
PROMPTS = {"worker": "rollout/0", "incarnation": 1}
FUTURE = {"rows": (make_row(3), make_row(3, versions=np.array([0, 0, 1], np.int32)))}


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "message: 0 bytes"),
        ([b"\xc1rubbish"], "message: 8 bytes starting b'\\xc1rubbish'"),
        ([b"\x01"], "op: got 1"),
        ([pack_request("explode", 77)], "op: got 'explode'"),
        ([pack_request("trained", 77)], "version: missing"),
        ([pack_request("trained", 77, version="1")], "version: got '1'"),
        ([pack_request("trained", 77, version=1)], "version: got 1"),
        ([pack_request("served", 77, version=5)], "version: got 5"),
        ([pack_request("take", 77, version=3, wait_s=0)], "version: got 3"),
        ([pack_request("take", 77, version=0, wait_s=-1)], "wait_s: got -1"),
        ([pack_request("admit", 77, worker="rollout/0", incarnation=1, max_groups=0, wait_s=0)], "max_groups: got 0"),
        ([pack_request("admit", 77, worker="w" * 300, incarnation=1, max_groups=1, wait_s=0)], "worker: got 'www"),
        ([pack_request("fail", 77, **FAILED | {"incarnation": 0})], "incarnation: got 0"),
        ([pack_request("fail", 77, **FAILED | {"group_id": 9})], "group_id: got 9"),
        ([pack_request("fail", 77, **FAILED | {"requeue": 1})], "requeue: got 1"),
        ([pack_request("fail", 77, **FAILED | {"data_row": -2})], "data_row: got -2"),
        ([pack_request("prompts", 77, **PROMPTS, sources=[[2**26, 1], [1, 1]])], "sources: got 67108865"),
        ([pack_request("prompts", 77, **PROMPTS, sources=[[1, 2**26], [1, 1]])], "sources: got 67108865"),
        ([PUT], "message: 1 frames"),
        ([PUT, b"?"], "message: got 63"),
        ([PUT, bytes(2 * 10**5)], "group: 200000 bytes"),
        (put_frames(dataclasses.replace(FIRST, group_id=99)), "group_id: got 99"),
        ([PUT, put_frames(dataclasses.replace(FIRST, group_id=1))[1]], "group_id: got 1, allowed 0"),
        (put_frames(FIRST, worker="rollout/1"), "worker: got 'rollout/1'"),
        (put_frames(OTHER_PROMPT), "prompt_index: got 3"),
        (put_frames(OTHER_START), "start_version: got 1"),
        (put_frames(FIRST, **FUTURE), "versions: got 1"),
        (put_frames(FIRST, rows=(make_row(3),)), "lengths: 1 elements"),
    ],
)
def test_a_bad_message_is_refused_and_counted_and_changes_nothing(
    buffer: BufferServer, learner: LearnerClient, frames: list[bytes], message: str
) -> None:
    slots = with_worker(buffer.address, lambda worker: worker.admit(4))
    before = buffer.counters()
    reply = ask(buffer.address, frames)
    assert message in reply["error"], reply
    assert buffer.counters() == {**before, "buffer/refused": 1}

    async def put_granted(worker: WorkerClient) -> None:
        for slot in slots:
            assert await worker.put(make_group(slot))

    with_worker(buffer.address, put_granted)
    assert len(learner.take(0).groups) == 4


def test_a_group_that_comes_again_is_not_read_again(buffer: BufferServer, learner: LearnerClient) -> None:
    """So a repeated message costs nothing; here its second group could not even be read."""
    with_worker(buffer.address, lambda worker: worker.admit(1))
    assert ask(buffer.address, put_frames(FIRST))["result"]["stored"] is True
    reply = ask(buffer.address, [PUT, b"?"])
    assert (reply["error"], reply["result"]["stored"]) == ("", False)
    assert buffer.counters()["buffer/refused"] == 0


def test_a_refusal_reaches_the_worker_as_an_error_and_the_group_goes_on(
    buffer: BufferServer, learner: LearnerClient
) -> None:
    async def run(worker: WorkerClient) -> bool:
        slots = await worker.admit(1)
        with pytest.raises(WireError, match=r"versions: got 1"):
            await worker.put(make_group(slots[0], **FUTURE))
        return await worker.put(make_group(slots[0]))

    assert with_worker(buffer.address, run) is True
