"""The servers that the tests of this folder share. Those with vLLM are skipped where `make vllm` was not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.kit.configs import server_config, with_keys
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import MODELS, push, pushing
from tests.kit.engines.servers import SGLangServer, VLLMServer
from tests.kit.engines.vllm import START_S, needs_vllm
from tests.kit.models import save_sharp_model


@pytest.fixture(scope="session")
def hf_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineInThread]:
    """An hf engine that serves `model_folder` at version 0 or, after a test that updates weights, at a later one."""
    server = EngineInThread(server_config("hf", model_folder), tmp_path_factory.mktemp("hf-logs"))
    server.run(server.engine.start())
    yield server
    server.close()


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of 32 numbers, which vLLM's kernels take."""
    return save_sharp_model(tmp_path_factory.mktemp("vllm-model"), "tiny-qwen3")


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """Serves `vllm_model` at version 0 or, after a test that updates weights, at a later one."""
    needs_vllm()
    folder = tmp_path_factory.mktemp("vllm-logs")
    server = VLLMServer(with_keys(server_config("vllm", vllm_model), folder / "keys"), folder)
    server.run(server.engine.start(), START_S)
    yield server
    server.close()


@pytest.fixture(scope="session")
def overlapping_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """An SGLang server with its overlap schedule, as on GPUs. Serves `model_folder`, later what tests pushed last."""
    folder = tmp_path_factory.mktemp("overlapping-logs")
    config = server_config("sglang", model_folder, server_args={"disable-overlap-schedule": False})
    server = SGLangServer(with_keys(config, folder / "keys"), folder)
    server.run(server.engine.start(), server.config.timeouts.startup_s)
    yield server
    server.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine, whose servers the test starts itself."""
    if request.param == "vllm":
        needs_vllm()
    return str(request.param)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> EngineInThread:
    """The running server that the parameter names: an engine's, see `on_all`, or `overlapping`."""
    running: EngineInThread = request.getfixturevalue(f"{request.param}_server")
    return running


@pytest.fixture
def served(server: EngineInThread, tmp_path: Path) -> PreTrainedModel:
    """Weights that are not those at its start, which the server serves from now on. Its prefix cache is empty.

    They are the same whichever tests ran before, since how long replies get and how they differ depends on them.
    """
    return MODELS[push(pushing(server, tmp_path, "retract", "disk"), server.engine.url, seed=1)]
