"""The worker of an evaluation server: it plays held-out prompts when it is asked to, and reports its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from async_rl.base.config import Config
from async_rl.base.messages.reports import WorkerReport
from async_rl.base.telemetry.nvml import GpuSampler
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Sample
from rollout_server.worker.scored_player import ScoredPlayer

REPORT_INTERVAL_S = 0.5
MOST_REPORTS_PER_S = 200.0
"""The most reports a second of all workers together. A report takes 0.7 ms of the driver (benchmarks/scale.py).
With more than a hundred workers each reports less often."""


class EvalWorker:
    """Reports on an engine and its player, whose `evaluate` others call. It knows no buffer; a `Worker` does.

    It may be created in any thread; all its coroutines run in one event loop.
    """

    def __init__(self, config: Config, player: ScoredPlayer) -> None:
        self.player = player
        self._config = config
        self._name = player.name
        self._stats = player.stats
        self._gpus = GpuSampler(self._name)
        self._report_interval_s = max(REPORT_INTERVAL_S, config.placement.num_servers / MOST_REPORTS_PER_S)
        self._is_stopped = False

    async def run(self) -> AsyncGenerator[WorkerReport]:
        """Yield a report twice a second until `stop` is called."""
        while not self._is_stopped:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._report_interval_s):
                    await self.player.log.report_now.wait()
            self.player.log.report_now.clear()
            yield await self._report()

    def status(self) -> Status:
        return self._stats.status()

    async def stop(self) -> None:
        """End `run`, and what the player's episodes need."""
        self._is_stopped = True
        await self.player.aclose()
        self._gpus.close()

    async def _report(self) -> WorkerReport:
        """Return a report of the time since the last one: metrics, console lines, timeline spans and load samples."""
        load, now_s = await self.player.engine.load(), time.monotonic()
        occupancy = (Sample(self._name, "occupancy", now_s, load.running / load.slots),) if load and load.slots else ()
        return WorkerReport(
            metrics=tuple(self.player.drain_metrics()), notes=self.player.drain_notes(),
            spans=self._stats.drain_spans(), samples=occupancy + self._gpus.drain(),
        )
