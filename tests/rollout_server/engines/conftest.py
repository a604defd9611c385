"""A vLLM server that the tests of this folder share. They are skipped where `make vllm` was not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.configs import server_config, with_keys
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.vllm import START_S, needs_vllm
from tests.kit.models import save_sharp_model


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of 32 numbers, which vLLM's kernels take."""
    return save_sharp_model(tmp_path_factory.mktemp("vllm-model"), "tiny-qwen3")


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineInThread]:
    """Serves `vllm_model` at version 0 or, after a test that updates weights, at a later one."""
    needs_vllm()
    folder = tmp_path_factory.mktemp("vllm-logs")
    server = EngineInThread(with_keys(server_config("vllm", vllm_model), folder / "keys"), folder)
    server.run(server.engine.start(), START_S)
    yield server
    server.close()
