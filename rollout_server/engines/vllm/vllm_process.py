"""The process of a vLLM server: the Python that runs it, its command line and its environment variables."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.cores import server_threads
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.network import api_key
from rollout_server.engines.server_process import ServerProcess, command_line
from rollout_server.engines.vllm.admin import VLLMAdmin
from rollout_server.engines.vllm.flags import Flags
from rollout_server.engines.vllm.server.launch import PARENT_VARIABLE
from rollout_server.engines.vllm.server.require_key import API_KEY_VARIABLE

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


def vllm_process(name: str, flags: Flags, log_file: Path, config: Config, *, on_gpu: bool) -> ServerProcess:
    """Return the process of a vLLM server with these flags, before its start.

    Raises:
        ConfigError: rollout.python is no program that can be run.
    """
    python = server_python(config)
    identity = f"async-rl-{uuid.uuid4().hex}"
    guard = {"middleware": "require_key.RequireKey"} if api_key(config.network) else {}
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
        ConfigError: rollout.python, or the default .venv-vllm, is no program that can be run.
    """
    path = config.rollout.engine_entry.server_python(config.rollout.python)
    check(
        os.access(path, os.X_OK), "rollout.python", path, "the Python of an environment with vLLM",
        "`make vllm` makes one in .venv-vllm.",
    )
    return path


def server_environment(config: Config, python: str, on_gpu: bool) -> dict[str, str]:
    """Return all environment variables for the server's process: this process's, changed for `python` and vLLM."""
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
