"""Weights that a vLLM server copies out of the learner's memory: the code path of cuda_ipc, with host memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from async_rl.config import WeightSyncConfig
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.vllm import MODELS, push


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_weights_in_shared_memory_arrive_whole(vllm_server: EngineInThread, tmp_path: Path) -> None:
    sync = WeightSyncConfig(transport="cuda_ipc", bucket_bytes=300_000)
    config = dataclasses.replace(vllm_server.config, weight_sync=sync)
    request = request_for(3)
    for _ in range(2):
        version = push(config, vllm_server.engine.url)
        (replies,) = generate(vllm_server, request)
        assert {v for a in replies for v in a.versions.tolist()} == {version}
        assert largest_error(MODELS[version], [request], [replies]) < TOLERANCE
