"""Tests with a vLLM server: where they are skipped, when they run, and how long the server may take to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.engines.vllm.engine import server_python
from tests.kit.configs import server_config

START_S = 280.0


def vllm(*values: Any) -> Any:
    """Parameters of a nightly test, the first of them the engine's name."""
    return pytest.param("vllm", *values, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])


def needs_vllm() -> None:
    """Skip the test where there is no environment with vLLM."""
    try:
        server_python(server_config("vllm", Path("model")))
    except ConfigError as error:
        pytest.skip(str(error))
