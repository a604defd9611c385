"""A vLLM server that shares the learner's GPU: every token has the logprob of its version, also after a push."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, ModelConfig, WeightSyncConfig
from async_rl.base.weights.publisher import open_publisher
from rollout_server.engines.base import SampledReply
from tests.kit.configs import changed, server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import request_for
from tests.kit.engines.tags import check_tags
from tests.kit.engines.vllm import START_S, needs_vllm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
TEMPERATURE = 0.3
"""Low, so that answers rarely end early."""


def perturbed(folder: Path, version: int, device: torch.device) -> PreTrainedModel:
    """The model of the folder, with weights that differ from those of other versions by a tenth of their spread."""
    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * version * parameter.std(unbiased=False) * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("on_update", "transport"), [("in_place", "cuda_ipc"), ("retract", "cuda_ipc"), ("in_place", "disk")]
)
def test_answers_over_a_push_are_true_to_their_versions(
    model_path: Path, device: torch.device, on_update: str, transport: str, tmp_path: Path
) -> None:
    needs_vllm()
    base = server_config("vllm", model_path, gpu_memory_utilization=0.3)
    config: Config = changed(
        base, model=ModelConfig(path=str(model_path), dtype="float32"), run={"dir": tmp_path},
        weight_sync=WeightSyncConfig(on_update=on_update, transport=transport),
    )
    models = {version: perturbed(model_path, version, device) for version in (0, 1)}
    server = EngineInThread(config, tmp_path)
    request = request_for(6, n=16, max_tokens=450, temperature=TEMPERATURE)

    async def generate_over_a_push() -> list[SampledReply]:
        running = asyncio.create_task(server.engine.generate(request))
        await server.engine.generate(request_for(7))  # the group runs once this is answered
        publisher = open_publisher(config, [server.engine.url], 0, device)
        await asyncio.to_thread(publisher.transport.connect)
        await asyncio.to_thread(publisher.push, models[1].named_parameters(), 1)
        publisher.close()
        return await running

    try:
        server.run(server.engine.start(), START_S)
        answers = server.run(generate_over_a_push())
    finally:
        server.close()
    spanning = [a for a in answers if set(a.versions.tolist()) == {0, 1}]
    assert len(spanning) >= 2
    assert all((np.diff(a.versions) >= 0).all() for a in answers)
    on_cpu = {version: model.cpu() for version, model in models.items()}
    for answer in spanning[:4]:
        keeps_kv = on_update == "in_place"
        tolerance = TEMPERATURE * 1.5e-3  # of logprobs 1.5e-3
        check_tags(on_cpu, request.prompt.tokens, answer, TEMPERATURE, keeps_kv=keeps_kv, tolerance=tolerance)
