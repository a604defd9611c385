"""Engines with an error that a certificate must name; as `rollout.engine: tests.kit.engines.planted:COLD`, say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_rl.base.seams import ENGINES, EngineEntry
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine


def _asking_otherwise(engine: Any, **changes: Any) -> Any:
    class Otherwise(engine):  # type: ignore[misc]
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            replies: list[SampledReply] = await super().generate(replace(request, **changes))
            return replies

    return Otherwise


def _narrow_sglang(*arguments: Any, **settings: Any) -> Any:
    from rollout_server.engines.sglang.engine import SGLangEngine

    return _asking_otherwise(SGLangEngine, top_p=0.9)(*arguments, **settings)


COLD: EngineEntry = replace(ENGINES["hf"], open=_asking_otherwise(HFEngine, temperature=0.99))
NARROW_SGLANG: EngineEntry = replace(ENGINES["sglang"], open=_narrow_sglang)
