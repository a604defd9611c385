"""Rollout servers of one run with different engines (placement.rollout.engines)."""

from __future__ import annotations

import pytest
import torch

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.seams import working_transports
from async_rl.base.weights.publisher import open_publisher

BASE = ("model.path=m", "task.name=reasoning_gym/x")
MIXED = ("placement.rollout.servers=3", "placement.rollout.engines=[sglang, vllm, sglang]")


def load(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def test_each_server_has_the_engine_of_its_place_in_the_list() -> None:
    config = load(*MIXED, "rollout.python=/venv/bin/python", "rollout.server_args={log-level: info}")
    assert list(config.engine_entries) == ["sglang", "vllm"]
    first, second = (resolve(config, engine_of(config, f"rollout/{i}")).rollout for i in (0, 1))
    assert (first.engine, first.python, first.server_args) == ("sglang", "", {"log-level": "info"})
    assert (second.engine, second.python, second.server_args) == ("vllm", "/venv/bin/python", {})


@pytest.mark.parametrize(("second", "transport"), [("vllm", "cuda_ipc"), ("hf", "disk")])
def test_auto_is_a_transport_that_all_engines_receive(second: str, transport: str) -> None:
    entries = load(f"placement.rollout={{servers: 2, engines: [sglang, {second}]}}").engine_entries.values()
    assert working_transports(entries, "cpu", one_device=False, own_gpus=False)[0] == "gloo"
    assert working_transports(entries, "cuda", one_device=True, own_gpus=False)[0] == transport


def test_each_server_is_administered_by_the_admin_of_its_engine() -> None:
    config = load(*MIXED, "weight_sync.transport=gloo")
    publisher = open_publisher(config, [f"http://127.0.0.1:{port}" for port in (1, 2, 3)], 0, torch.device("cpu"))
    kinds = [type(publisher.members.admin(name)).__name__ for name in publisher.members.names]
    assert kinds == ["SGLangAdmin", "VLLMAdmin", "SGLangAdmin"]
