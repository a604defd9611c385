"""SGLang's logprobs compared with the learner's at the start and after a push through each transport.

Also answers that run during a push: which version sampled each token.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from async_rl.base.config import Config, PlacementConfig, WeightSyncConfig
from async_rl.base.weights.publisher import open_publisher
from async_rl.base.weights.transport import serving_dtype
from learner.loop.updater import Updater
from learner.models.policy import full_parameters
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.own_gpu import OWN_GPU, placed, transports
from tests.kit.engines.replies import request_for
from tests.kit.engines.tags import check_tags
from tests.kit.learner.served_batches import Note, check_agreement, generated
from tests.kit.models import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
TEMPERATURE = 0.3
"""Low, so that answers rarely end early."""
Answer = tuple[GenerationRequest, SampledReply]


def change(updater: Updater) -> None:
    """Change the weights by a tenth of their spread."""
    updater.policy.reshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in updater.policy.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local += 0.1 * local.std(unbiased=False) * torch.randn_like(local)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class Memory:
    """Checks of the free memory of a GPU that a server shares with the learner; on a CPU they always pass.

    Args:
        of_server_bytes: the server's share, for weights and KV cache.
    """

    def __init__(self, device: torch.device, of_server_bytes: float) -> None:
        self._device = device
        self._of_server_bytes = of_server_bytes
        self._before_bytes = free_bytes(device)

    def check_released(self) -> None:
        assert free_bytes(self._device) - self._before_bytes >= 0.8 * self._of_server_bytes

    def check_resumed(self) -> None:
        assert free_bytes(self._device) - self._before_bytes <= 0.2 * self._of_server_bytes


@OWN_GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_server_and_learner_agree_at_the_start_and_after_each_transports_push(
    config: Config, device: torch.device, one_rank: None, note: Note, tmp_path: Path, dtype: str, own_gpu: bool
) -> None:
    if (device.type, dtype) == ("cpu", "bfloat16"):
        pytest.skip("bfloat16 on a CPU says nothing about a GPU")
    config = placed(changed(config, model={"dtype": dtype}), own_gpu)
    updater = Updater(config, device)
    at_start_bytes = free_bytes(device)
    server = EngineInThread(dataclasses.replace(config, placement=PlacementConfig(colocated=True)), tmp_path / "logs")
    try:
        server.run(server.engine.start(), timeout_s=600.0)
        check_agreement("start", updater, generated(server, config), note)
        for version, (transport, in_turns) in enumerate(transports(device, own_gpu), start=1):
            change(updater)
            pushing = dataclasses.replace(
                config, placement=PlacementConfig(colocated=in_turns),
                # in place the prompts, the same each time, would be answered from their KV of the version before
                weight_sync=WeightSyncConfig(
                    transport=transport, on_update="retract", bucket_bytes=2**20,  # type: ignore[arg-type]
                ),
            )
            publisher = open_publisher(pushing, [server.engine.url], 0, device)
            publisher.transport.connect()
            held = Memory(device, config.rollout.gpu_memory_utilization * at_start_bytes)
            if in_turns:
                publisher.release_server_memory()
                held.check_released()
            publisher.push(full_parameters(updater.policy, serving_dtype(config, device.type)), version)
            held.check_resumed()
            publisher.close()
            what = f"{transport}{' in turns' if in_turns else ''}"
            check_agreement(what, updater, generated(server, config), note)
    finally:
        server.close()


def perturbed(folder: Path, version: int) -> PreTrainedModel:
    """A different model for each version, on the CPU."""
    torch.manual_seed(version)
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * parameter.std(unbiased=False) * torch.randn_like(parameter)
    return model


@OWN_GPU
@pytest.mark.parametrize("on_update", ["in_place", "retract"])
def test_every_token_has_the_version_that_sampled_it_across_a_push(
    config: Config, device: torch.device, one_rank: None, model_path: Path, tmp_path: Path, on_update: str,
    own_gpu: bool,
) -> None:
    """Computed in float32, where versions differ visibly. SGLang's overlap schedule is on."""
    config = placed(config, own_gpu)
    server_args = config.rollout.server_args | {"disable-overlap-schedule": False}
    config = dataclasses.replace(
        changed(config, model={"dtype": "float32"}), weight_sync=WeightSyncConfig(on_update=on_update),  # type: ignore[arg-type]
        rollout=dataclasses.replace(config.rollout, max_response_tokens=800, server_args=server_args),
    )
    server = EngineInThread(dataclasses.replace(config, placement=PlacementConfig(colocated=True)), tmp_path / "logs")
    models: dict[int, PreTrainedModel] = {}

    def push(transport: str, in_turns: bool) -> None:
        version = len(models) + 1
        models[version] = perturbed(model_path, version)
        pushing = dataclasses.replace(
            config, placement=PlacementConfig(colocated=in_turns),
            weight_sync=WeightSyncConfig(transport=transport, on_update=on_update),  # type: ignore[arg-type]
        )
        publisher = open_publisher(pushing, [server.engine.url], 0, device)
        publisher.transport.connect()
        if in_turns:
            publisher.release_server_memory()
        publisher.push(((name, p.to(device)) for name, p in models[version].named_parameters()), version)
        publisher.close()

    async def answers_over_a_push(first: int, transport: str, in_turns: bool) -> list[Answer]:
        """Answer groups one after the other, several at once, until the push is over, however long it takes."""
        pushing = asyncio.create_task(asyncio.to_thread(push, transport, in_turns))
        running: dict[asyncio.Task[list[SampledReply]], GenerationRequest] = {}
        while not pushing.done():
            if sum(not task.done() for task in running) < 4:
                request = request_for(first + len(running), n=8, max_tokens=800, temperature=TEMPERATURE)
                running[asyncio.create_task(server.engine.generate(request))] = request
            await asyncio.sleep(0.05)
        await pushing
        return [(request, reply) for task, request in running.items() for reply in await task]

    try:
        server.run(server.engine.start(), timeout_s=600.0)
        push("disk", False)
        for number, (transport, in_turns) in enumerate(transports(device, own_gpu), start=1):
            answers = server.run(answers_over_a_push(1000 * number, transport, in_turns), timeout_s=300.0)
            both = {version: models[version] for version in list(models)[-2:]}
            spanning = [each for each in answers if set(each[1].versions.tolist()) == set(both)]
            assert len(spanning) >= 2, transport
            for request, answer in spanning[:3]:
                check_tags(
                    both, request.prompt.tokens, answer, TEMPERATURE, keeps_kv=on_update == "in_place" and not in_turns,
                    tolerance=TEMPERATURE * (1e-4 if device.type == "cpu" else 1e-2),  # of logprobs 1e-4 and 1e-2
                )
    finally:
        server.close()
