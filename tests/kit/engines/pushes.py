"""Pushes of new weights into a running server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from async_rl.config import Config, WeightSyncConfig
from async_rl.weights import open_publisher
from async_rl.weights.base import Tolerance, WeightPublisher
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.models import sharp_model

VERSIONS = itertools.count(5000)
"""Numbers that are in no other request, so that they can be those of groups too."""
MODELS: dict[int, PreTrainedModel] = {}
"""The weights that servers were given, by version."""


def pushing(
    server: EngineInThread, folder: Path, on_update: str, transport: str, staging: str = "none", **sections: Any
) -> Config:
    """The configuration of pushes in several buckets."""
    sync = WeightSyncConfig(on_update=on_update, transport=transport, bucket_bytes=300_000, staging=staging)
    return changed(server.config, run={"dir": folder}, weight_sync=sync, **sections)


def new_version(config: Config, seed: int | None = None) -> int:
    """Make the weights of a new version and return its number. Without a seed they are unlike all others."""
    version = next(VERSIONS)
    family = AutoConfig.from_pretrained(config.model.path).model_type
    MODELS[version] = sharp_model(f"tiny-{family}", 100 + version if seed is None else seed).eval()
    return version


def connected(config: Config, url: str) -> WeightPublisher:
    publisher = open_publisher(config, [url], 0, torch.device("cpu"))
    publisher.connect()
    return publisher


def deliver(publisher: WeightPublisher, version: int) -> None:
    """Make the server serve a version. If learner and server take turns, the learner has its turn before."""
    if publisher.config.shares_gpus:
        publisher.release_server_memory()
    publisher.push(MODELS[version].named_parameters(), version)


def push(config: Config, url: str, seed: int | None = None) -> int:
    """Make the server serve a new version, check that it does, and return its number."""
    version, publisher = new_version(config, seed), connected(config, url)
    deliver(publisher, version)
    tokens = list(range(5, 30))
    with torch.no_grad():
        logprobs = torch.log_softmax(MODELS[version](input_ids=torch.tensor([tokens])).logits[0], dim=-1)
    publisher.verify(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])], Tolerance(1e-4, 1e-4))
    publisher.close()
    return version
