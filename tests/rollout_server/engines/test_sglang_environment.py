"""Environment variables with which an SGLang server on a GPU could not start."""

from __future__ import annotations

import pytest

from rollout_server.engines.sglang.launch import server_environment
from tests.kit.configs import make_config


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "rest"),
    [
        ("expandable_segments:True", ""), ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        ("expandable_segments:True,backend:native", "backend:native"), ("backend:native", "backend:native"),
    ],
)
def test_a_server_that_releases_memory_has_no_expandable_segments(
    name: str, value: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert server_environment(make_config(), {"dtype": "auto"})[name] == value
    assert server_environment(make_config(), {"dtype": "auto", "enable-memory-saver": True})[name] == rest
