"""The process of an SGLang server: its command line, made from the config, and its environment variables."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.cores import server_threads
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.network import api_key
from async_rl.base.seams.doc_pages import doc_page
from rollout_server.engines.kv_cache import graph_replies, kv_token_bytes, kv_tokens
from rollout_server.engines.server_process import ServerProcess, command_line, free_port
from rollout_server.engines.sglang.admin import SGLangAdmin
from rollout_server.engines.sglang.launch import API_KEY_VARIABLE, PARENT_VARIABLE
from rollout_server.engines.sglang.staging_admin import BASE_VARIABLE, SWAP

_RESERVED_TOKENS = 8
"""The number of positions of a context that SGLang keeps for itself."""
_POLICIES_WITH_PRIORITY = ("fcfs", "lof")
"""The values of SGLang's schedule-policy with which it starts with priorities."""
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_BUILDS = "It builds kernels with nvcc, of the CUDA toolkit of torch's CUDA, and ninja: see `async-rl doctor`."
HINTS = (
    (
        "leave no GPU memory for the KV cache",
        "Raise rollout.gpu_memory_utilization, or end what else uses the GPU (`nvidia-smi`): it is a share of what "
        "was free.",
    ),
    ("failed to dispatch data type Float", "This kernel has no float32: set model.dtype: bfloat16."),
    ("out of memory", "Lower rollout.gpu_memory_utilization."),
    ("Not enough memory", "Lower rollout.max_groups_in_flight or rollout.max_response_tokens."),
    ("No module named 'sglang'", f"Install SGLang ({doc_page('installing.md')}), or set rollout.engine=hf."),
    ("MissingKernelError", "This model needs a kernel this host lacks: use a Qwen or Llama text model."),
    ("are not supported for now", "SGLang does not know this architecture: set rollout.engine=hf."),
    ("SafetensorError", "A weight file of model.path is damaged or cut off."),
    ("Could not find CUDA installation", _BUILDS), ("nvcc", _BUILDS), ("ninja", _BUILDS),
    ("unrecognized arguments", "A key of rollout.server_args is no flag of this SGLang."),
)

Flags = dict[str, Any]


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int, seed: int) -> Flags:
    """Return SGLang's flags {name: value} without the port; rollout.server_args take precedence.

    `model` is the text part of the model's transformers config.
    """
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model-path": os.path.abspath(config.model.path), "host": config.network.host, "dtype": dtype,
        "random-seed": seed,
        "context-length": config.longest_tokens + _RESERVED_TOKENS,
        "weight-version": "0",
        "skip-tokenizer-init": not config.rollout.stop,  # tokens in, tokens out: only stop texts are looked for in text
        "sampling-defaults": "openai",  # not the model's generation_config: it narrows the support
        "load-snapshot-publish-interval": 1,  # in decode steps; /v1/loads reports it, and occupancy comes from that
        "log-level": "warning",
        "custom-weight-loader": [SWAP],
        # With speculative decoding overlap_pause.py does not know how many tokens of a forward count.
        "disable-overlap-schedule": not on_gpu or (config.weight_sync.on_update == "in_place" and _speculates(config)),
    }
    if on_gpu:
        flags |= {"mem-fraction-static": config.rollout.gpu_memory_utilization, "tp-size": config.placement.rollout.tp}
        flags |= {"enable-memory-saver": True} if config.shares_gpus else {}
        flags["cuda-graph-max-bs-decode"] = graph_replies(config)
        # On Hopper GPUs SGLang's default is FA3, which can't compute float32.
        flags |= {"attention-backend": "triton"} if dtype == "float32" else {}
    else:
        flags |= {
            "device": "cpu",
            "skip-server-warmup": True,  # nothing to compile
            "sleep-on-idle": True,  # otherwise an idle scheduler polls on a core that the learner needs
            "max-total-tokens": kv_tokens(
                config, kv_token_bytes(model, dtype), config.longest_tokens + _RESERVED_TOKENS, free_memory_bytes
            ),
        }
    user = _user_flags(config)
    if user.get("schedule-policy", "fcfs") in _POLICIES_WITH_PRIORITY:
        # Requests wait by their priority, but none is preempted: its KV would be computed again with newer weights.
        flags |= dict.fromkeys(
            ("enable-priority-scheduling", "schedule-low-priority-values-first", "disable-priority-preemption"), True
        )
        flags["default-priority-value"] = 0  # without one, SGLang's scheduler fails at the end of its own warm-up
    return flags | user


def _user_flags(config: Config) -> Flags:
    return {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}


def _speculates(config: Config) -> bool:
    return "speculative-algorithm" in _user_flags(config)


def cuda_runtime_folders() -> list[str]:
    """Return the folders where installed Python packages have put the CUDA runtime, libcudart; [] without any."""
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package of many wheels, in one or more site-packages
    roots = nvidia.submodule_search_locations if nvidia else None
    return sorted({str(file.parent) for root in roots or () for file in Path(root).glob("*/lib/libcudart.so.*")})


def sglang_process(name: str, flags: Flags, log_file: Path, config: Config, port: int = 0) -> ServerProcess:
    """Return the process of an SGLang server with these flags, before its start; `port` 0 stands for a free one."""
    identity = f"async-rl-{uuid.uuid4().hex}"
    words = command_line(flags | {"served-model-name": identity})

    def is_ready(url: str) -> bool:
        """Return whether the server at `url` is ready and this one, not another run's. If so, freeze its objects, see
        `SGLangAdmin.freeze_garbage_collection`.
        """
        admin = SGLangAdmin(config, url)
        with suppress(WeightSyncError, WaitTimeoutError):
            if admin.has_started() and admin.serves_model(identity):
                admin.freeze_garbage_collection()
                return True
        return False

    return ServerProcess(
        name, log_file, config, port=port, is_ready=is_ready, hints=HINTS,
        environment=server_environment(config, flags),
        command=lambda port: [
            sys.executable, "-m", "rollout_server.engines.sglang.launch", *words,
            *command_line({"port": port} | _own_rendezvous(config, flags, port)),
        ],
        shared_files=("sglang_loads_*", "sem.mp-*"),  # SGLang's reports of its load, and its semaphores
    )


def _own_rendezvous(config: Config, flags: Flags, port: int) -> Flags:
    """Return the flag for the port where the server's own processes meet, if network.ports bounds it.

    SGLang would take a free one of the kernel's. `port` is the server's.
    """
    others = [each for each in config.network.port_range if each != port]
    if not others or "nccl-port" in flags:
        return {}
    return {"nccl-port": free_port(config.network.host, others)}


def server_environment(config: Config, flags: Flags) -> dict[str, str]:
    """Return all environment variables for the server's process: this process's, changed for SGLang."""
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), API_KEY_VARIABLE: api_key(config.network)}
    environment[BASE_VARIABLE] = os.path.abspath(config.model.path)
    # The context length may exceed the model's by the positions that SGLang reserves; this makes SGLang accept it.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # By default a server closes an idle connection after 5 s, perhaps while the next request is on its way. The
    # clients close theirs after 15 s.
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "60"
    environment["OMP_NUM_THREADS"] = server_threads(config)
    # SGLang calls `ninja` to build kernels. It must find this environment's, even if that is not activated.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if flags["dtype"] == "float32":  # otherwise Triton rounds factors to 10 bits of mantissa (TF32)
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
        if "mem-fraction-static" in flags:  # on a GPU SGLang's own kernels for norms and activations have no float32
            environment.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    if "enable-memory-saver" in flags:
        # The memory saver is loaded before Python, and only Python finds a CUDA runtime that came in wheels.
        folders = [os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders()]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        for name in _ALLOCATOR_SETTINGS:  # the memory saver ends a server that has expandable segments
            if name in environment:
                environment[name] = re.sub(r"(^|,)expandable_segments:\w+", "", environment[name]).strip(",")
    return environment
