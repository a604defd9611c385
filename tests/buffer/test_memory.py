"""With the learner stopped, the buffer fills to its capacity and stays there, however hard workers push."""

from __future__ import annotations

import asyncio
import gc
import math
import time

import numpy as np
import psutil
import pytest

from async_rl.base.config import RolloutConfig
from async_rl.base.messages.codec import encode_group
from buffer.client import WorkerClient
from tests.kit.buffer.clients import learner_at, with_worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group, make_row

TOKENS = 2048


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.nightly)])
def test_with_the_learner_stopped_memory_stays_within_the_stated_capacity(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.05)
    rollout = RolloutConfig(group_size=4, max_response_tokens=TOKENS)
    config = buffer_config(max_staleness=3, prompts_per_step=32, rollout=rollout)
    rows = tuple(make_row(TOKENS, logprobs=np.full(TOKENS, -1.0 - i, np.float32)) for i in range(4))
    with serving(config) as server, learner_at(server):

        async def flood(worker: WorkerClient) -> tuple[int, int, int]:
            """Asks for slots all the time, for `seconds` after the buffer is full, and delivers each group twice."""
            stored = size = full_bytes = 0
            until_s = math.inf
            while time.monotonic() < until_s:
                slots = await worker.admit(1000)
                for slot in slots:
                    group = make_group(slot, rows=rows)
                    stored += await worker.put(group)
                    assert not await worker.put(group)
                    size = len(encode_group(group))
                if not slots and not full_bytes:
                    full_bytes, until_s = resident_bytes(), time.monotonic() + seconds
                await asyncio.sleep(0)
            return stored, size, full_bytes

        before = resident_bytes()
        stored, group_bytes, full_bytes = with_worker(server.address, flood)
        after = resident_bytes()
        assert stored == config.slots == 128
        assert server.counters()["buffer/slots_held"] == config.slots
        capacity_bytes = config.slots * group_bytes
        assert after - before <= 2 * capacity_bytes + 2**24, "more than its groups and the sockets' room"
        assert after - full_bytes <= 2**22, "grows when full"
