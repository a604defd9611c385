"""The vLLM engine starts a server in vLLM's own Python environment and sends it one HTTP request for each group.

From top to bottom: the runs that vLLM refuses, the server's flags, its process (server/launch.py), the requests.

vLLM computes the prompt's KV once for all replies of a request, except the tokens after its last full cache block.
vLLM's samples depend on how it batches requests, so runs don't repeat exactly (with the hf engine they do).
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError, WaitTimeoutError, WeightSyncError
from async_rl.base.host import free_host_bytes, server_threads
from async_rl.base.network import api_key
from rollout_server.engines.base import GenerationRequest, Load, graph_replies, head_size, kv_token_bytes, kv_tokens
from rollout_server.engines.http_engine import HttpEngine, OpenReply, cache_key
from rollout_server.engines.server_process import ServerProcess, command_line
from rollout_server.engines.vllm.admin import GENERATE, VLLMAdmin
from rollout_server.engines.vllm.server.launch import API_KEY_VARIABLE, PARENT_VARIABLE

_RUNNING = "vllm:num_requests_running"
_CACHE = re.compile(r'^vllm:cache_config_info\{(.*)\}', re.MULTILINE)
_FIND_TIMEOUT_S = 60
_MAX_TEMPERATURE = 2.0
"""The highest temperature that vLLM's server accepts."""
_FIND_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes for which vLLM 0.32 has an attention kernel on CPUs."""
_RESERVED_TOKENS = 8
"""The number of positions of a context beyond the longest prompt with its reply."""
_BLOCK_TOKENS = 32
"""The size of a KV block on CPUs, the smallest for which vLLM has a kernel: long blocks waste memory."""
_MAX_RUNNING = 1024
"""The largest number of replies that one server runs simultaneously, unless rollout.server_args has max-num-seqs."""
_SERVER_FOLDER = Path(__file__).parent / "server"
_HINTS = (
    ("out of memory", "Lower rollout.gpu_memory_utilization."),
    ("No available memory for the cache blocks",
    "Raise rollout.gpu_memory_utilization, or lower rollout.max_response_tokens."),
    ("No module named 'vllm'", "rollout.python must be the Python of an environment with vLLM: `make vllm` makes one."),
    ("Unsupported CPU attention configuration", "Take a model with another head size, or another rollout.engine."),
    ("are not supported for now", "vLLM does not know this architecture: set rollout.engine=hf."),
    ("SafetensorError", "A weight file of model.path is damaged or cut off."),
    ("unrecognized arguments", "A key of rollout.server_args is no flag of this vLLM."),
)

Flags = dict[str, Any]


def refuse_run(config: Config) -> str:
    """Return why vLLM can't serve the model of model.path on this host, or "" if it can.

    Raises:
        ConfigError: rollout.python is missing or has no vLLM, or vLLM does not support a temperature or top_p.
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
    narrowed = {name: value for name in ("top_k", "min_p") if (value := getattr(config.rollout, name))}
    check(
        not narrowed, "rollout", narrowed, f"without top_k and min_p with rollout.engine {config.rollout.engine}",
        "It would report logprobs over the tokens that they keep. Set top_p, or another rollout.engine.",
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
    """Raise ConfigError unless rollout.python is a Python that can import vllm."""
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


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int, seed: int) -> Flags:
    """Return vLLM's flags {name: value} without the port. Flags in rollout.server_args take precedence.

    Args:
        model: the text part of the model's transformers config.
        free_memory_bytes: the host's free memory, a share of which the KV cache may use.
        seed: the server's random seed.
    """
    positions = getattr(model, "max_position_embeddings", None)
    length = config.longest_tokens + _RESERVED_TOKENS
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model": os.path.abspath(config.model.path), "host": config.network.host, "dtype": dtype,
        "seed": seed,
        "max-model-len": min(length, positions or length),
        "max-num-seqs": min(_MAX_RUNNING, config.max_running_replies),
        "tokens-only": True,  # tokens in, tokens out: nothing to detokenize
        "generation-config": "vllm",  # not the model's: it narrows the support
        "logprobs-mode": "processed_logprobs",  # at the sampling temperature
        "scheduling-policy": "priority",
        "worker-extension-cls": "weight_receiver.WorkerExtension",
        "weight-transfer-config": {"backend": "async_rl"},
        "disable-uvicorn-access-log": True,
    }
    if on_gpu:
        flags |= {
            "gpu-memory-utilization": config.rollout.gpu_memory_utilization,
            "tensor-parallel-size": config.placement.rollout.tp,
            "max-cudagraph-capture-size": graph_replies(config),
            # With it, a forward runs while the tokens of the one before are read. Whether these get the right version
            # when a pause in place comes between has been tested only without it.
            "no-async-scheduling": config.weight_sync.on_update == "in_place",
        }
    else:
        blocks = -(-length // _BLOCK_TOKENS) + 1  # vLLM keeps one block for itself
        token_bytes = kv_token_bytes(model, dtype)
        flags |= {
            "enforce-eager": True,  # compiling takes most of the start, and tiny models gain little
            "block-size": _BLOCK_TOKENS,
            "kv-cache-memory-bytes": token_bytes * kv_tokens(
                config, token_bytes, blocks * _BLOCK_TOKENS, free_memory_bytes
            ),
        }
    return flags | {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}


def vllm_process(name: str, flags: Flags, log_file: Path, config: Config, *, on_gpu: bool) -> ServerProcess:
    """Return a `ServerProcess` for a vLLM server with these flags, not started yet.

    Raises:
        ConfigError: rollout.python can't be executed.
    """
    python = server_python(config)
    identity = f"async-rl-{uuid.uuid4().hex}"
    guard = {"middleware": "launch.RequireKey"} if api_key(config.network) else {}
    words = command_line(flags | {"served-model-name": identity} | guard)

    def is_ready(url: str) -> bool:
        """Return whether the server at `url` is ready and is this one, not another run's on the same port."""
        admin = VLLMAdmin(config, url)
        with suppress(WeightSyncError, WaitTimeoutError):
            return admin.is_ready() and admin.serves_model(identity)
        return False

    return ServerProcess(
        name, log_file, config, is_ready=is_ready, hints=_HINTS, environment=server_environment(config, python, on_gpu),
        command=lambda port: [python, str(_SERVER_FOLDER / "launch.py"), *words, "--port", str(port)],
    )


def server_python(config: Config) -> str:
    """Return the path of the Python that runs the server.

    Raises:
        ConfigError: rollout.python, by default the one in .venv-vllm, can't be executed.
    """
    path = config.rollout.engine_entry.server_python(config.rollout.python)
    check(
        os.access(path, os.X_OK), "rollout.python", path, "the Python of an environment with vLLM",
        "`make vllm` makes one in .venv-vllm.",
    )
    return path


def server_environment(config: Config, python: str, on_gpu: bool) -> dict[str, str]:
    """Return the environment of the server's process: a copy of this process's, with the variables for vLLM set.

    Args:
        python: the Python that runs the server; its folder comes first in PATH.
        on_gpu: False: also bind no threads to cores, and do not compile.
    """
    environment = os.environ | {
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONPATH": str(_SERVER_FOLDER),  # and nothing of this environment, whose packages have other versions
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints for pauses and weight updates
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # By default a server closes an idle connection after 5 s, perhaps while the next request is on its way. The
        # clients close theirs after 15 s.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment["OMP_NUM_THREADS"] = server_threads(config)
    if key := api_key(config.network):
        environment[API_KEY_VARIABLE] = key
    if not on_gpu:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # placement.pin_cpus chooses the cores
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling the sampler would delay the first reply
    return environment


class VLLMEngine(HttpEngine):
    """The `Engine` of rollout.engine=vllm: starts one vLLM server and sends it its worker's requests."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        super().__init__(config, index, log_dir, "vLLM")

    async def open_server(self, model: Any, on_gpu: bool) -> None:
        flags = server_flags(
            self._config, model, on_gpu=on_gpu, free_memory_bytes=free_host_bytes(), seed=self._seed
        )
        self._slots = int(flags["max-num-seqs"])
        self.server = vllm_process(self._name, flags, self._log_file, self._config, on_gpu=on_gpu)
        await self.server.start()
        self.url = self.server.url
        await asyncio.to_thread(VLLMAdmin(self._config, self.url).set_version, 0)

    async def _extend(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        await asyncio.gather(*(self._extend_equal(request, each) for each in group_replies(replies)))

    async def _extend_equal(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        """Extend replies that have equal tokens so far: one request samples further tokens for all of them."""
        key = f"{request.key}.{next(self._attempts)}"
        body = request_body(request, replies, self.end_tokens, key, self.priority(request))
        response = await self.post(GENERATE, body, [key], request.key)
        for reply, choice in zip(replies, response["choices"], strict=True):
            extend_reply(reply, choice, request.max_tokens, self.end_tokens, may_abort=self.resubmits)

    def _abort_request(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}  # as this endpoint names them

    async def load(self) -> Load | None:
        """Return the number of replies running on the server, and its capacity; None: no answer within LOAD_TIMEOUT_S.
        """
        text = await self._get_text("/metrics")
        if text is None:
            return None
        running = sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(_RUNNING))
        rollout = self._config.rollout
        slots = min(self._slots, rollout.max_groups_in_flight * rollout.group_size)
        return Load(min(running, slots), slots, kv_tokens_in(text))


def kv_tokens_in(metrics: str) -> int:
    """Return the size of vLLM's KV cache in tokens, read from the text of its /metrics; 0 if it is not there."""
    found = _CACHE.search(metrics)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    sizes = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    return int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else 0


def group_replies(replies: list[OpenReply]) -> list[list[OpenReply]]:
    """Split `replies` into lists, one per request: new replies share a request, each reply with tokens has its own."""
    new = [reply for reply in replies if not reply.tokens]
    return ([new] if new else []) + [[reply] for reply in replies if reply.tokens]


def request_body(
    request: GenerationRequest, replies: list[OpenReply], end_tokens: list[int], key: str, priority: int
) -> dict[str, Any]:
    """Return the body of a request that samples the tokens that `replies` still lack.

    All must have the same tokens so far.

    The body sets every parameter that could exclude tokens from sampling, even to vLLM's default.

    Args:
        key: the id of the request.
        priority: vLLM's scheduler runs lower numbers first.
    """
    sampled = replies[0].tokens
    return {
        "request_id": key, "token_ids": request.prompt.tokens.tolist() + sampled, "priority": priority,
        "cache_salt": cache_key(request),
        "sampling_params": {
            "n": len(replies), "max_tokens": request.max_tokens - len(sampled), "temperature": request.temperature,
            "top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p,
            "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "logprobs": 0, "ignore_eos": True, "stop_token_ids": end_tokens,
            "detokenize": False,
        },
    }


def extend_reply(
    reply: OpenReply, choice: dict[str, Any], max_tokens: int, end_tokens: list[int], *, may_abort: bool
) -> None:
    """Append the tokens of one choice of a response to `reply`, and set its finish_reason if it has ended.

    Raises AsyncRLError as OpenReply.extend does.
    """
    logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    reply.extend(
        choice["token_ids"] or [], logprobs, choice["weight_versions"], choice["finish_reason"],
        max_tokens=max_tokens, end_tokens=end_tokens, may_abort=may_abort,
    )
