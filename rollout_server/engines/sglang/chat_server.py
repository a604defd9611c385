"""An SGLang server of judge.path, which answers chats in OpenAI's protocol and gets no weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from async_rl.base.config import Config
from rollout_server.engines.server_process import ServerProcess
from rollout_server.engines.sglang.sglang_process import Flags, sglang_process

CPU_CACHE_TOKENS = 2**15
"""The tokens for which a server on the CPU has room."""


def open_chat_server(config: Config, name: str, log_file: Path, port: int = 0) -> ServerProcess:
    """Return the process of a server of judge.path, before its start.

    Args:
        port: the port that it listens on, the port of the server before it; 0: a free one.
    """
    flags = chat_server_flags(config, on_gpu=torch.cuda.is_available())
    return sglang_process(f"SGLang server {name}", flags, log_file, config, port)


def chat_server_flags(config: Config, *, on_gpu: bool) -> Flags:
    """Return SGLang's flags {name: value} without the port; judge.server_args take precedence."""
    flags: Flags = {
        "model-path": os.path.abspath(config.judge.path), "host": config.network.host, "random-seed": config.run.seed,
        "dtype": "auto" if on_gpu else "float32", "log-level": "warning",
    }
    if on_gpu:
        flags |= {"mem-fraction-static": config.rollout.gpu_memory_utilization, "tp-size": config.placement.judge.tp}
    else:
        flags |= {
            "device": "cpu", "skip-server-warmup": True, "sleep-on-idle": True, "max-total-tokens": CPU_CACHE_TOKENS,
            "disable-overlap-schedule": True,
        }
    return flags | {key.replace("_", "-"): value for key, value in config.judge.server_args.items()}
