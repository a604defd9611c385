"""Engines that start from a copy of a model folder without weights, and get all of them by the first push."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.config import Config
from async_rl.storage.file_copies import CopyCache
from async_rl.storage.file_sources import find_source
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import MODELS, connected, new_version, pushing
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for, with_engine
from tests.kit.engines.vllm import START_S, vllm
from tests.kit.models import save_sharp_model


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model folder without weights, as the driver makes it on another host. vLLM takes its heads, too."""
    source = find_source("model.path", str(save_sharp_model(tmp_path / "whole", "tiny-qwen3"))).without_weights()
    copy = CopyCache(tmp_path / "cache").begin(source, source.digests())
    for file in source.files:
        copy.write(file.name, 0, b"".join(source.pieces(file)))
    return copy.finish()


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=pytest.mark.nightly), vllm()], indirect=True)
def test_the_first_push_brings_every_weight(engine: str, bare: Path, tmp_path: Path) -> None:
    server = EngineInThread(server_config(engine, bare), tmp_path)
    try:
        server.run(server.engine.start(), START_S)
        # The hf engine is in this process, which can't be in a process group twice.
        config = pushing(server, tmp_path / "runs", "retract", "disk" if engine == "hf" else "gloo")
        config.run_dir.mkdir(parents=True)
        publisher, version, requests = connected(config, server.engine.url), new_version(config), [request_for(3)]
        before = generate(server, *requests)
        assert largest_error(MODELS[version], requests, before) > 1
        assert publisher.push(MODELS[version].named_parameters(), version, erases=True).lost == ()
        publisher.close()
        assert largest_error(MODELS[version], requests, generate(server, *requests)) < TOLERANCE
    finally:
        server.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_hf_engine_has_the_types_and_buffers_that_it_has_with_weights(
    bare: Path, tmp_path: Path, dtype: str
) -> None:
    def state(config: Config) -> dict[str, torch.Tensor]:
        async def read(engine: HFEngine) -> dict[str, torch.Tensor]:
            parameters = {name: torch.zeros_like(each) for name, each in engine.model.named_parameters()}
            return parameters | dict(engine.model.named_buffers())

        return with_engine(changed(config, model={"dtype": dtype}), read)

    expected, found = state(server_config("hf", tmp_path / "whole")), state(server_config("hf", bare))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
