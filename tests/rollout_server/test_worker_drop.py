"""A worker with `staleness.late: drop`: groups that the buffer drops are cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from async_rl.config import StalenessConfig
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.configs import worker_config
from tests.kit.engines.fakes import EchoEngine
from tests.kit.worker import SCORED, rolled_out


class SlowOnceEngine(EchoEngine):
    """Never answers the first group."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        if request.group_id == 0:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.cancelled.append(request.group_id)
                raise
        return await super().generate(request)


def test_a_dropped_group_is_cancelled_at_the_engine_and_its_prompt_is_granted_again() -> None:
    config = worker_config()
    config = replace(config, staleness=StalenessConfig(max=1, late="drop"))
    engine = SlowOnceEngine()
    batches, _, server, _ = rolled_out(config, engine, lambda *_: SCORED, steps=4)
    assert engine.cancelled == [0]
    assert server.counters()["buffer/dropped_late"] == 1
    again = [request for request in engine.requests if request.prompt.index == 0]
    assert len(again) == 1 and again[0].group_id > 0  # its first request was never answered
    assert all(0 not in [group.group_id for group in batch.groups] for batch in batches)
