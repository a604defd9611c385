"""An engine from outside the packages, with a setting: a file that counts the tokens of each version."""

from __future__ import annotations

from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.config.section import section
from async_rl.base.seams import EngineEntry
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.engines.http_admin import HttpAdmin


@section("rollout.params")
class CountingSettings:
    """The settings of the engine; a run sets them as rollout.params.file=tokens."""

    file: str = "counting"
    """The first part of the name of each server's file in the log folder."""


class CountingEngine(HFEngine):
    """The hf engine, with a file in the log folder that says how many tokens of each version it has sampled."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        super().__init__(config, index, log_dir)
        settings: CountingSettings = config.rollout.settings
        self._log_file = log_dir / f"{settings.file}-{index}.log"

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        replies = await super().generate(request)
        with self._log_file.open("a") as log:
            log.writelines(f"{version}\n" for reply in replies for version in reply.versions)
        return replies


COUNTING = EngineEntry(
    open=CountingEngine, open_admin=HttpAdmin, update_policies=("in_place", "retract"), receives=("folder",),
    computes_in_worker=True, settings=CountingSettings,
)
