"""Environment variables of NCCL that learner and servers must have alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_rl.base.config import Config, ModelConfig, RunConfig, TaskConfig
from async_rl.run.processes.actors import Origin, enter

NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


def test_every_process_of_a_run_shares_memory_by_nccl_as_sglang_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})  # SGLang keeps what is set, so it agrees too
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    task = TaskConfig(name="reasoning_gym/chain_sum")
    config = Config(model=ModelConfig(path="none"), task=task, run=RunConfig(dir=str(tmp_path)))
    enter(Origin(str(tmp_path), config), "learner/0")
    assert {name: os.environ[name] for name in NCCL} == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}


def test_sglang_sets_these_variables_and_keeps_what_is_set() -> None:
    """It has been so in SGLang 0.5.21; otherwise the learner's settings must follow."""
    import importlib.util

    package = importlib.util.find_spec("sglang")
    assert package and package.submodule_search_locations
    text = (Path(package.submodule_search_locations[0]) / "srt" / "entrypoints" / "engine.py").read_text()
    for name in NCCL:
        assert f'"{name}" not in os.environ' in text and f'os.environ["{name}"] = str(' in text
