"""Fixtures of the tests for GPUs. With ASYNC_RL_GPU_TESTS=cpu those that make sense there run on a CPU.

ASYNC_RL_GPU_MODEL        folder of a model to take instead of one made from config
ASYNC_RL_GPU_SERVER_ARGS  JSON, for rollout.server_args: what SGLang needs on this machine
ASYNC_RL_GPU_RESULTS      folder for measured.jsonl, a line for each distribution
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.base.config import Config
from async_rl.base.network import agree_on_nccl
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import make_config
from tests.kit.learner.served_batches import Note


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("ASYNC_RL_GPU_TESTS") != "cpu":
        pytest.skip("needs an NVIDIA GPU; ASYNC_RL_GPU_TESTS=cpu runs what can run without")
    return torch.device("cpu")


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[None]:
    agree_on_nccl()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_path(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.1 B parameters on a GPU, 0.5 M on a CPU, with three times the initial weights, so tokens differ."""
    if path := os.environ.get("ASYNC_RL_GPU_MODEL"):
        return Path(path)
    folder = tmp_path_factory.mktemp("gpu-model")
    tokenizer = character_tokenizer()
    layers, hidden = (12, 768) if device.type == "cuda" else (2, 128)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(device: torch.device, model_path: Path, tmp_path: Path) -> Config:
    server_args = json.loads(os.environ.get("ASYNC_RL_GPU_SERVER_ARGS", "{}"))
    longest = 256 if device.type == "cuda" else 48
    return make_config(
        model_path, task={"name": "reasoning_gym/spell_backward", "max_prompt_tokens": 128}, run={"dir": tmp_path},
        rollout={
            "group_size": 8, "max_response_tokens": longest, "max_groups_in_flight": 64, "gpu_memory_utilization": 0.3,
            "server_args": server_args,
        },
        learner={"prompts_per_step": 8, "lr": 1e-6, "max_tokens_per_microbatch": 8192},
    )


@pytest.fixture
def note(request: pytest.FixtureRequest, device: torch.device) -> Note:
    """Record a distribution of differences, for people and for scripts/gpu_suite.sh."""

    def write(what: str, differences: np.ndarray, **more: Any) -> None:
        size = np.abs(differences)
        line = {
            "test": request.node.name, "what": what, "device": device.type, "tokens": int(size.size),
            "mean_abs": float(size.mean()), "p99_abs": float(np.quantile(size, 0.99)), "max_abs": float(size.max()),
            "mean": float(np.mean(differences)), **more,
        }  # fmt: skip
        print(json.dumps(line))
        if folder := os.environ.get("ASYNC_RL_GPU_RESULTS"):
            with (Path(folder) / "measured.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    return write
