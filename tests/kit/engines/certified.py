"""Runs of a few steps with the hf engine and a learner in one process, and their certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from async_rl.base.config import Config
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.telemetry.certificate import ParityAxis, certificate
from async_rl.base.telemetry.metrics import Declaration, Figures
from async_rl.base.types import Batch
from async_rl.base.weights.publisher import open_publisher
from learner.loop.pushes import Pusher
from learner.loop.updater import Updater
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.engines.replies import request_for, with_engine
from tests.kit.groups import batch_of, make_group, make_row

STEPS, PROMPTS = 4, 24
Plant = Callable[[HFEngine], None]


async def sampled(engine: HFEngine, config: Config, version: int) -> Batch:
    """A batch whose tokens all have the version that is served."""
    asks: dict[str, Any] = config.rollout.sampling._asdict() | {
        "wants_support": config.records_support, "wants_routing": recorded_experts(config) is not None
    }
    asked = [
        request_for(PROMPTS * version + index, start_version=version, max_tokens=24, **asks)
        for index in range(PROMPTS)
    ]
    replies = await asyncio.gather(*map(engine.generate, asked))
    groups = [
        make_group(
            request.group_id, request.prompt.tokens.tolist(),
            [
                make_row(
                    r.tokens.tolist(), r.logprobs.tolist(), float(sample % 2), version=version, support=r.support,
                    routing=r.routing,
                )
                for sample, r in enumerate(of_request)
            ],
            version=version, baseline_reward=0.5 if config.algorithm.advantage_entry.needs_greedy_baseline else None,
        )
        for request, of_request in zip(asked, replies, strict=True)
    ]  # fmt: skip
    return batch_of(*groups, version=version)


def certified(config: Config, plant: Plant = lambda engine: None) -> dict[str, ParityAxis]:
    """The axes of a run of a few steps by name: sample, train, push and verify. The error is planted after step 1."""

    async def run(engine: HFEngine) -> list[ParityAxis]:
        updater = Updater(config, torch.device("cpu"))
        pusher = Pusher(config, updater, open_publisher(config, [engine.url], 0, torch.device("cpu")))
        declared: dict[str, Declaration] = {}
        figures = Figures(declared)
        for version in range(STEPS):
            batch = await sampled(engine, config, version)
            metrics = updater.update(batch)
            if version == 1:
                plant(engine)
            report, lost = await asyncio.to_thread(pusher.push, version + 1, batch)
            record = {metric.key: metric.value for metric in metrics}
            record |= {"parity/weights/compared": report.num_compared, "parity/weights/unequal": report.num_unequal}
            declared |= {metric.key: metric.declaration for metric in metrics}
            declared |= {f"parity/weights/{name}": Declaration("sum") for name in ("compared", "unequal")}
            figures.add(record)
            if lost:
                break
        pusher.close()
        return certificate(figures.all())

    return {axis.name: axis for axis in with_engine(config, run)}


def config_of(model: Path, dtype: str = "float32", **rollout: Any) -> Config:
    return changed(
        server_config("hf", model, **rollout),
        model={"dtype": dtype}, weight_sync={"transport": "disk", "verify_every": 1},
        learner={"lr": 1e-3}, run={"dir": model.parent}, algorithm={"filter_zero_variance": False},
    )  # fmt: skip
