"""Configurations of a vLLM server, and pushes of new weights into it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config import Config, WeightSyncConfig
from async_rl.errors import ConfigError
from async_rl.weights import open_publisher
from async_rl.weights.base import Tolerance, WeightPublisher
from rollout_server.engines.vllm.vllm_process import server_python
from tests.kit.configs import changed, server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.models import sharp_model

START_S = 280.0
VERSIONS = itertools.count(10)
MODELS: dict[int, PreTrainedModel] = {}
"""The weights that the server was given, by version."""


def needs_vllm() -> None:
    """Skip the test where there is no environment with vLLM."""
    try:
        server_python(server_config("vllm", Path("model")))
    except ConfigError as error:
        pytest.skip(str(error))


def pushing(server: EngineInThread, folder: Path, on_update: str, transport: str) -> Config:
    return changed(
        server.config, run={"dir": folder},
        weight_sync=WeightSyncConfig(on_update=on_update, transport=transport, bucket_bytes=300_000),
    )


def new_version() -> int:
    """Make the weights of a new version, very different from all others, and return its number."""
    version = next(VERSIONS)
    MODELS[version] = sharp_model("tiny-qwen3", 100 + version).eval()
    return version


def connected(config: Config, url: str) -> WeightPublisher:
    publisher = open_publisher(config, [url], 0, torch.device("cpu"))
    publisher.connect()
    return publisher


def push(config: Config, url: str) -> int:
    """Make the server serve a new version, and return its number."""
    version, publisher = new_version(), connected(config, url)
    model = MODELS[version]
    publisher.push(model.named_parameters(), version)
    tokens = list(range(5, 30))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], dim=-1)
    publisher.verify(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])], Tolerance(1e-4, 1e-4))
    publisher.close()
    return version
