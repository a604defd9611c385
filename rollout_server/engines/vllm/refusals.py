"""Reasons for which vLLM can't serve a run on this host, found before anything starts."""

from __future__ import annotations

import subprocess

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError
from rollout_server.engines.kv_cache import head_size
from rollout_server.engines.vllm.flags import CPU_HEAD_SIZES
from rollout_server.engines.vllm.vllm_process import server_python

_FIND_TIMEOUT_S = 60
_MAX_TEMPERATURE = 2.0
"""The highest temperature that vLLM's server accepts."""
_FIND_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def refuse_run(config: Config) -> str:
    """Return why vLLM can't serve the model of model.path on this host, or "" if it can.

    Raises:
        ConfigError: rollout.python is missing or has no vLLM, or vLLM can't sample at a temperature or top_p.
    """
    import torch
    from transformers import AutoConfig

    temperatures = {
        "rollout.temperature": config.rollout.temperature, "eval.temperature": config.eval.sampling(config.rollout)[0]
    }
    allowed = f"at most {_MAX_TEMPERATURE} with rollout.engine {config.rollout.engine}"
    for key, temperature in temperatures.items():
        check(temperature <= _MAX_TEMPERATURE, key, temperature, allowed, "Its server refuses higher ones.")
    check(
        config.rollout.top_p == 1.0 or not torch.cuda.is_available(), "rollout.top_p", config.rollout.top_p,
        f"1.0 with rollout.engine {config.rollout.engine} on a GPU",
        "There its sampler reports logprobs over the tokens that top_p keeps. Or set another rollout.engine.",
    )
    check_environment(config)
    size = head_size(AutoConfig.from_pretrained(config.model.path).get_text_config())
    if torch.cuda.is_available() or size in CPU_HEAD_SIZES:
        return ""
    return (
        f"on CPUs vLLM has attention kernels for heads of {', '.join(map(str, CPU_HEAD_SIZES))} numbers, and this "
        f"model has heads of {size}. Take another model (sft.base: tiny-qwen3 makes a tiny one) or another "
        "rollout.engine"
    )


def check_environment(config: Config) -> None:
    """Raise ConfigError unless rollout.python can be run and finds the package vllm."""
    python = server_python(config)
    try:
        done = subprocess.run([python, "-c", _FIND_VLLM], capture_output=True, text=True, timeout=_FIND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.python {python} can't be run: {error}. `make vllm` makes one that can") from None
    if done.returncode:
        raise ConfigError(
            f"rollout.python {python} finds no package vllm. `make vllm` makes .venv-vllm, which has it, and "
            "with an empty rollout.python that one is used"
        )
