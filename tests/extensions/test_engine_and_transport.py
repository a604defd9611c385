"""An engine and a transport from outside the packages generate and push through the public entry points."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from async_rl.config import Config, RunConfig, WeightSyncConfig
from async_rl.errors import ConfigError
from async_rl.weights import open_publisher
from rollout_server.engines.base import Completion, open_engine
from tests.rollout_server.engines.hf_cases import config_for, recomputed_logprobs, request_for, sharp_model

ENGINE = "tests.extensions.engine:COUNTING"
TRANSPORT = "tests.extensions.transport:NEW_FOLDERS"


def extended_config(model_folder: Path, run_dir: Path, transport: str = TRANSPORT) -> Config:
    config = config_for(model_folder)
    return dataclasses.replace(
        config, run=RunConfig(dir=str(run_dir)),
        rollout=dataclasses.replace(config.rollout, engine=ENGINE),
        weight_sync=WeightSyncConfig(transport=transport, verify=False),
    )


def test_an_engine_and_a_transport_from_outside_push_and_generate(model_folder: Path, tmp_path: Path) -> None:
    config = extended_config(model_folder, tmp_path)
    config.run_dir.mkdir()
    new = sharp_model("tiny-qwen2", 5).eval()

    async def generate_push_generate() -> tuple[list[Completion], list[Completion]]:
        engine = open_engine(config, 0, tmp_path)
        await engine.start()
        try:
            before = await engine.generate(request_for(1))
            publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
            publisher.connect()
            report = await asyncio.to_thread(publisher.push, new.named_parameters(), 4)
            publisher.close()
            assert report.num_bytes == sum(parameter.nbytes for parameter in new.parameters())
            return before, await engine.generate(request_for(1))
        finally:
            await engine.aclose()

    before, after = asyncio.run(generate_push_generate())
    assert {int(version) for answer in before for version in answer.versions} == {0}
    assert {int(version) for answer in after for version in answer.versions} == {4}
    for answer in after:
        assert answer.logprobs == pytest.approx(recomputed_logprobs(new, request_for(1), answer), rel=1e-3, abs=1e-4)
    counted = (tmp_path / "counting-0.log").read_text().split()
    assert [counted.count(version) for version in ("0", "4")] == [
        sum(len(answer.tokens) for answer in answers) for answers in (before, after)
    ]


def test_a_transport_that_the_engine_cannot_receive_from_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.transport must be auto or disk with .*:COUNTING, got 'gloo'"):
        extended_config(model_folder, tmp_path, "gloo")
