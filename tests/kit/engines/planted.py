"""Engines with an error that a certificate must name; as `rollout.engine: tests.kit.engines.planted:COLD`, say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from async_rl.base.seams import ENGINES, EngineEntry
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine


def _asking_otherwise(engine: Any, **changes: Any) -> Any:
    class Otherwise(engine):  # type: ignore[misc]
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            replies: list[SampledReply] = await super().generate(replace(request, **changes))
            return replies

    return Otherwise


def _with_shifted_experts(engine: Any) -> Any:
    """Each token gets the experts of the token before it."""

    class Shifted(engine):  # type: ignore[misc]
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            replies: list[SampledReply] = await super().generate(request)
            return [
                reply if reply.routing is None else replace(reply, routing=np.roll(reply.routing, 1, axis=0))
                for reply in replies
            ]

    return Shifted


def _sglang(change: Callable[[Any], Any]) -> EngineEntry:
    def open_engine(*arguments: Any) -> Any:
        from rollout_server.engines.sglang.engine import SGLangEngine

        return change(SGLangEngine)(*arguments)

    return replace(ENGINES["sglang"], open=open_engine)


COLD: EngineEntry = replace(ENGINES["hf"], open=_asking_otherwise(HFEngine, temperature=0.99))
COLD_SGLANG = _sglang(lambda engine: _asking_otherwise(engine, temperature=0.99))
NARROW_SGLANG = _sglang(lambda engine: _asking_otherwise(engine, top_p=0.9))
SHIFTED_SGLANG = _sglang(_with_shifted_experts)
