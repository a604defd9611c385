"""Experts at a server after each push, with SGLang and the hf engine; every token uses every expert of the model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config import Config, RunConfig, WeightSyncConfig
from async_rl.errors import WeightSyncError
from async_rl.weights import WeightPublisher, open_publisher
from async_rl.weights.base import Tolerance
from async_rl.weights.checkpoint_names import to_checkpoint
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import with_engine
from tests.kit.tiny_moe import moe_model, save_moe

TOKENS = list(range(5, 60))
EXACT = Tolerance(1e-5, 1e-4)


def pushing(
    config: Config, transport: str, run_dir: Path, on_update: str = "in_place", staging: str = "none"
) -> Config:
    run_dir.mkdir(exist_ok=True)
    sync = WeightSyncConfig(
        transport=transport, bucket_bytes=50_000, on_update=on_update, staging=staging  # type: ignore[arg-type]
    )
    return dataclasses.replace(config, run=RunConfig(dir=str(run_dir)), weight_sync=sync)


def push_and_verify(publisher: WeightPublisher, seed: int, version: int, *, by_folder_names: bool = True) -> None:
    """Push the model of another seed, with which the server's logprobs must then agree."""
    model = moe_model(seed)
    named = model.named_parameters()
    publisher.push(to_checkpoint(model, named) if by_folder_names else named, version, erases=True)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([TOKENS])).logits[0], dim=-1)
    publisher.verify(TOKENS, [float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])], EXACT)


@pytest.fixture(scope="module")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineInThread]:
    folder = tmp_path_factory.mktemp("moe")
    server = EngineInThread(server_config("sglang", save_moe(folder / "model")), folder)
    server.run(server.engine.start())
    yield server
    server.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("transport", "staging"), [("gloo", "none"), ("gloo", "device"), ("cuda_ipc", "none"), ("disk", "none")]
)
def test_sglang_serves_the_learners_experts_after_each_push(
    moe_server: EngineInThread, transport: str, staging: str, tmp_path: Path
) -> None:
    on_update = "in_place" if transport == "gloo" else "retract"
    config = pushing(moe_server.config, transport, tmp_path / "run", on_update, staging)
    publisher = open_publisher(config, [moe_server.engine.url], 0, torch.device("cpu"))
    for seed in (11, 12):
        push_and_verify(publisher, seed, version=seed)
    publisher.close()


@pytest.mark.e2e
def test_experts_that_sglang_does_not_load_are_named(moe_server: EngineInThread, tmp_path: Path) -> None:
    """SGLang skips the names of transformers in silence: this is how they were pushed once."""
    config = pushing(moe_server.config, "gloo", tmp_path / "run")
    publisher = open_publisher(config, [moe_server.engine.url], 0, torch.device("cpu"))
    said = r"did not reach 4 weights of rollout/0, .*: model\.layers\.0\.mlp\.experts\.w13_weight, "
    with pytest.raises(WeightSyncError, match=said):
        push_and_verify(publisher, 13, version=13, by_folder_names=False)
    push_and_verify(publisher, 14, version=14)  # a whole push makes the server good again
    publisher.close()


def test_the_hf_engine_serves_the_learners_experts_after_each_push(tmp_path: Path) -> None:
    config = pushing(server_config("hf", save_moe(tmp_path / "model")), "disk", tmp_path / "run")

    async def push_twice(engine: HFEngine) -> None:
        publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
        for seed in (11, 12):
            await asyncio.to_thread(push_and_verify, publisher, seed, version=seed)
            served = dict(engine.model.named_parameters())
            assert all(torch.equal(tensor, served[name]) for name, tensor in moe_model(seed).named_parameters())
        publisher.close()

    with_engine(config, push_twice)


def test_the_hf_engine_names_weights_that_hold_nan(tmp_path: Path) -> None:
    async def erase(engine: HFEngine) -> None:
        assert await engine.unloaded_weights() == []
        await engine.erase_weights()
        assert len(await engine.unloaded_weights()) == len(list(engine.model.parameters()))
        engine.model.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
        engine.model.get_parameter("model.layers.1.mlp.experts.down_proj").data[3, 5, 7] = torch.nan
        assert await engine.unloaded_weights() == ["model.layers.1.mlp.experts.down_proj"]

    with_engine(server_config("hf", save_moe(tmp_path)), erase)
