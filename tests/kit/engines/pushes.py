"""Pushes of new weights into a running server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from async_rl.base.config import Config, LoraConfig, WeightSyncConfig
from async_rl.base.weights.checkpoint_names import to_checkpoint
from async_rl.base.weights.publisher import PushReport, Tolerance, WeightPublisher, open_publisher
from learner.models.lora import AdapterParcels, add_adapters, merged_parameters
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.models import load_model, sharp_model
from tests.kit.tiny_moe import moe_model

VERSIONS = itertools.count(5000)
"""Numbers that are in no other request, so that they can be those of groups too."""
MODELS: dict[int, PreTrainedModel] = {}
"""The weights that servers were given, by version."""
ADAPTED: dict[int, PreTrainedModel] = {}
"""The models with adapters whose merged weights are those of MODELS, by version."""
FORMS: dict[str, dict[str, Any]] = {"adapter": {"lora": "adapter"}, "delta": {"delta": True}}
"""The settings of weight_sync for pushes that servers make whole."""


def pushing(
    server: EngineInThread, folder: Path, on_update: str, transport: str, form: str = "none", **sections: Any
) -> Config:
    """The configuration of pushes in several buckets.

    Args:
        form: a value of weight_sync.double_buffer, or one of FORMS.
    """
    sync = WeightSyncConfig(
        on_update=on_update, transport=transport, bucket_bytes=300_000, **FORMS.get(form, {"double_buffer": form})
    )
    if sync.lora == "adapter":
        sections = {"model": {"lora": LoraConfig(rank=4)}, **sections}
    return changed(server.config, run={"dir": folder}, weight_sync=sync, **sections)


def new_version(config: Config, seed: int | None = None) -> int:
    """Make the weights of a new version and return its number. Without a seed they are unlike all others."""
    version = next(VERSIONS)
    seed = 100 + version if seed is None else seed
    if config.weight_sync.lora == "adapter":
        ADAPTED[version] = adapted_model(config, seed)
        MODELS[version] = load_model(Path(config.model.path))
        MODELS[version].load_state_dict(dict(merged_parameters(ADAPTED[version])), strict=False)
        return version
    MODELS[version] = model_of(config, seed)
    if config.weight_sync.delta:
        keep_most_values(MODELS[version], model_of(config, 7), seed)
    return version


def model_of(config: Config, seed: int) -> PreTrainedModel:
    """A model with other weights, of the family of model.path, and with as many experts."""
    found = AutoConfig.from_pretrained(config.model.path)
    if found.model_type == "qwen3_moe":
        return moe_model(seed, num_experts=found.num_experts, num_experts_per_tok=found.num_experts_per_tok)
    return sharp_model(f"tiny-{found.model_type}", seed).eval()


def adapted_model(config: Config, seed: int) -> PreTrainedModel:
    """The model of model.path with adapters that change what it says."""
    lm = load_model(Path(config.model.path))
    add_adapters(lm, config.model.lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return lm


@torch.no_grad()
def keep_most_values(model: PreTrainedModel, before: PreTrainedModel, seed: int) -> None:
    """Give `model` the values of `before`, but one in twenty."""
    generator = torch.Generator().manual_seed(seed)
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        new.copy_(torch.where(torch.rand(new.shape, generator=generator) < 0.05, new, old))


def connected(config: Config, url: str) -> WeightPublisher:
    return open_publisher(config, [url], 0, torch.device("cpu"))


def deliver(publisher: WeightPublisher, version: int, **options: bool) -> PushReport:
    """Make the server serve a version. If learner and server take turns, the learner has its turn before."""
    if publisher.config.shares_gpus:
        publisher.release_server_memory()
    if version in ADAPTED:
        weights = AdapterParcels(ADAPTED[version], torch.float32).parcels()
    else:
        weights = to_checkpoint(MODELS[version], MODELS[version].named_parameters())
    return publisher.push(weights, version, **options)


def verify(publisher: WeightPublisher, version: int, mean: float = 1e-4) -> None:
    """Check that the server's logprobs are those of a version, but for `mean` on average and 1e-4 at most."""
    tokens = list(range(5, 60))
    with torch.no_grad():
        logprobs = torch.log_softmax(MODELS[version](input_ids=torch.tensor([tokens])).logits[0], dim=-1)
    publisher.verify(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])], Tolerance(mean, 1e-4))


def push(config: Config, url: str, seed: int | None = None) -> int:
    """Make the server serve a new version, check that it does, and return its number."""
    version, publisher = new_version(config, seed), connected(config, url)
    deliver(publisher, version)
    verify(publisher, version)
    publisher.close()
    return version
