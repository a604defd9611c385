"""Deterministic inference: an answer is a function of weights, seed, prompt and sample, so strict synchrony repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.base.config import Config, EvalConfig, LoggingConfig, RunConfig, StalenessConfig
from rollout_server.engines.base import SampledReply
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import request_for, same_replies
from tests.kit.learner.served_batches import Note
from tests.kit.runs import logged

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.fixture
def deterministic(config: Config, device: torch.device) -> Config:
    """SGLang with deterministic inference or, on a CPU, the hf engine, which is always deterministic."""
    if device.type == "cpu":
        return changed(config, rollout={"engine": "hf"})
    server_args = {"attention-backend": "triton", **config.rollout.server_args, "enable-deterministic-inference": True}
    return changed(config, rollout={"server_args": server_args})


def test_answers_do_not_depend_on_what_else_the_server_computes(
    deterministic: Config, device: torch.device, tmp_path: Path, note: Note
) -> None:
    if device.type == "cpu":
        pytest.skip("for SGLang on a GPU")
    server = EngineInThread(deterministic, tmp_path / "logs")
    requests = [request_for(index, n=8, max_tokens=128) for index in range(24)]

    async def together() -> list[list[SampledReply]]:
        return list(await asyncio.gather(*map(server.engine.generate, requests)))

    try:
        server.run(server.engine.start(), timeout_s=600.0)
        crowded = server.run(together(), timeout_s=300.0)[0]
        alone = server.run(server.engine.generate(requests[0]), timeout_s=300.0)
    finally:
        server.close()
    assert same_replies(crowded, alone)
    note("alone against among 24 groups", np.concatenate([a.logprobs for a in crowded])
         - np.concatenate([a.logprobs for a in alone]))
    assert len({tuple(a.tokens.tolist()) for a in alone}) > 1


def test_two_runs_at_staleness_zero_train_on_the_same_answers(
    deterministic: Config, tmp_path: Path, note: Note
) -> None:
    """The answers of version 0 are exactly equal; those of later versions as far as the learner's kernels repeat."""
    from async_rl.pipeline import run

    series = []
    for name in ("first", "second"):
        run(changed(
            deterministic, run=RunConfig(name=name, dir=str(tmp_path), steps=4), eval=EvalConfig(num_prompts=0),
            staleness=StalenessConfig(max=0), logging=LoggingConfig(wandb="disabled"),
            algorithm={"filter_zero_variance": False},
        ))
        steps = [record for record in logged(tmp_path / name) if "reward/mean" in record]
        series.append([(record["reward/mean"], record["policy/grad_norm"]) for record in steps])
    first, second = map(np.array, series)
    assert first[0, 0] == second[0, 0]
    assert first[0, 1] == pytest.approx(second[0, 1], rel=1e-3)
    note("mean reward and gradient norm of each step, run against run", first - second)
