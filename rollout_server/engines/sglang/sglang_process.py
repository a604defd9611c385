"""Runs one SGLang server as a child process: makes its flags from the config, starts it, watches it and ends it.

The kernel kills the server when the thread that started it dies, so start it from a thread that lives as long as the
engine, such as the event loop's. SGLang's own children then end too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from async_rl.config import Config
from async_rl.errors import ProcessDiedError, WaitTimeoutError, WeightSyncError
from async_rl.network import api_key
from async_rl.storage.log_tail import log_tail
from rollout_server.engines.sglang.admin import SGLangAdmin
from rollout_server.engines.sglang.launch import API_KEY_VARIABLE, PARENT_VARIABLE
from rollout_server.engines.sglang.left_behind import FOLDER_PREFIX, sweep

_START_ATTEMPTS = 3
_RESERVED_TOKENS = 8
"""The number of positions of a context that SGLang keeps for itself."""
_KV_SHARE = 0.25
"""The share of a CPU host's free memory that all KV caches may take; the learner needs the rest."""

Flags = dict[str, Any]


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int) -> Flags:
    """Return SGLang's flags {name: value}, with rollout.server_args, without port. `model`: the text model's config."""
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model-path": config.model.path, "host": config.network.host, "dtype": dtype, "random-seed": config.run.seed,
        "context-length": config.longest_tokens + _RESERVED_TOKENS,
        "weight-version": "0",
        "skip-tokenizer-init": True,  # tokens in, tokens out: nothing to detokenize
        "sampling-defaults": "openai",  # not the model's generation_config: it narrows the support
        "load-snapshot-publish-interval": 1,  # in decode steps; /v1/loads reports it, and occupancy comes from that
        "log-level": "warning",
        # With overlap a forward runs while the tokens of the one before are read. A pause in place leaves the tokens of
        # that forward unread, and later tags these tokens of the old weights with the new version. Other pauses do not.
        "disable-overlap-schedule": not on_gpu or config.weight_sync.on_update == "in_place",
    }
    if on_gpu:
        flags |= {"mem-fraction-static": config.rollout.mem_fraction, "tp-size": config.placement.rollout.tp}
        flags |= {"enable-memory-saver": True} if config.takes_turns else {}
        # On Hopper GPUs SGLang's default is FA3, which can't compute float32.
        flags |= {"attention-backend": "triton"} if dtype == "float32" else {}
    else:
        flags |= {
            "device": "cpu",
            "skip-server-warmup": True,  # nothing to compile
            "sleep-on-idle": True,  # otherwise an idle scheduler polls on a core that the learner needs
            "max-total-tokens": _kv_tokens(config, model, dtype, free_memory_bytes),
        }
    user = {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}
    return flags | user


def _kv_tokens(config: Config, model: Any, dtype: str, free_memory_bytes: int) -> int:
    """Return a CPU server's KV cache size in tokens: for all rollouts in flight if memory allows, at least for one."""
    groups = min(config.rollout.concurrency, config.max_slots)
    rollouts = groups * config.rollout.group_size + config.eval.size * config.eval.samples
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    token_bytes = 2 * model.num_hidden_layers * heads * head_dim * (4 if dtype == "float32" else 2)
    affordable = int(_KV_SHARE * free_memory_bytes / config.placement.servers_per_node / token_bytes)
    return max(config.longest_tokens + _RESERVED_TOKENS, min(rollouts * config.longest_tokens, affordable))


def command_line(flags: Flags) -> list[str]:
    """Return the words `--key value ...`: True gives no value, False no flag, a list several values, a dict JSON."""
    words: list[str] = []
    for key, value in flags.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def free_port(host: str) -> int:
    """Return a port that is free now and below the range that the kernel uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port


def cuda_runtime_folders() -> list[str]:
    """Return the folders in which installed Python packages have put the CUDA runtime, libcudart; [] without any."""
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package of many wheels, in one or more site-packages
    roots = nvidia.submodule_search_locations if nvidia else None
    return sorted({str(file.parent) for root in roots or () for file in Path(root).glob("*/lib/libcudart.so.*")})


class ServerProcess:
    """One SGLang server: a child process that runs `rollout_server.engines.sglang.launch` with the given flags."""

    def __init__(self, name: str, flags: Flags, threads: int, log_file: Path, config: Config) -> None:
        self.name = name
        self.url = ""
        self.log_file = log_file
        self._flags = flags
        self._config = config
        self._environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), API_KEY_VARIABLE: api_key(config.network)}
        # The context length may exceed the model's by the positions that SGLang reserves; this makes SGLang accept it.
        self._environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        # By default a server closes an idle connection after 5 s, perhaps while the next request is on its way. The
        # clients close theirs after 15 s.
        self._environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "60"
        self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        # SGLang calls `ninja` to build kernels. It must find this environment's, even if that is not activated.
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        self._environment["PATH"] = os.pathsep.join(programs)
        if flags["dtype"] == "float32":  # otherwise Triton rounds factors to 10 bits of mantissa (TF32)
            self._environment.setdefault("TRITON_F32_DEFAULT", "ieee")
        if "enable-memory-saver" in flags:
            # The memory saver is loaded before Python, and only Python finds a CUDA runtime that came in wheels.
            folders = [os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders()]
            self._environment["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        self._process: subprocess.Popen[bytes] | None = None
        self._left_behind: set[Path] = set()
        self._log_start_bytes = 0

    async def start(self) -> None:
        """Start the server and return when it answers at `url`. If another process takes its port, try up to 3."""
        await asyncio.to_thread(sweep)
        for attempt in range(1, _START_ATTEMPTS + 1):
            port, identity = free_port(self._config.network.host), f"async-rl-{uuid.uuid4().hex}"
            self.url = f"http://{self._config.network.host}:{port}"
            self._process = self._spawn(self._flags | {"port": port, "served-model-name": identity})
            try:
                await self._wait_ready(identity)
                self._left_behind = _shared_memory_of(self._process)
                return
            except BaseException as error:
                died = isinstance(error, ProcessDiedError)
                clash = died and "address already in use" in self._log().lower()
                await self.aclose()
                if not clash or attempt == _START_ATTEMPTS:
                    raise

    def check_alive(self) -> None:
        """Raise ProcessDiedError, with advice and the end of the server's log, if the server has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            tail = log_tail(self.log_file, self._log_start_bytes)
            raise ProcessDiedError(f"{self.name} ended by itself ({how}). {_hint(self._log())}\n{tail}")

    async def aclose(self) -> None:
        """Kill the server (an orderly end takes 5 s longer) and its children; remove their sockets and load reports."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end_session, process, self._config.timeouts.shutdown_s)
            shutil.rmtree(self._scratch, ignore_errors=True)
            for file in self._left_behind:
                file.unlink(missing_ok=True)

    def _spawn(self, flags: Flags) -> subprocess.Popen[bytes]:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.mkdtemp(prefix=FOLDER_PREFIX)  # for SGLang's sockets, which it does not remove
        with self.log_file.open("ab") as log:
            self._log_start_bytes = log.tell()
            return subprocess.Popen(
                [sys.executable, "-m", "rollout_server.engines.sglang.launch", *command_line(flags)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment | {"TMPDIR": self._scratch},
                cwd=Path(__file__).parents[3],
                start_new_session=True,  # Ctrl-C goes to the driver only, which then ends the server
            )

    async def _wait_ready(self, identity: str) -> None:
        timeout_s, admin = self._config.timeouts.server_start_s, SGLangAdmin(self._config, self.url)
        try:
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(_answers, admin, identity):
                    self.check_alive()
                    await asyncio.sleep(0.1)  # the server sends no event when it is ready
        except TimeoutError:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s (timeouts.server_start_s) for {self.name} to start\n"
                + log_tail(self.log_file, self._log_start_bytes)
            ) from None

    def _log(self) -> str:
        with self.log_file.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")


def _answers(admin: SGLangAdmin, identity: str) -> bool:
    """Return whether the server is ready and is ours (serves `identity`); if so, freeze its garbage collection."""
    with suppress(WeightSyncError, WaitTimeoutError):
        if admin.is_ready() and admin.serves_model(identity):
            admin.freeze_garbage_collection()
            return True
    return False


def _end_session(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Kill the server and wait `timeout_s` at most; its children get 1 s to end and clean up before they are killed."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(timeout_s)
    psutil.wait_procs(children, timeout=1.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _shared_memory_of(process: subprocess.Popen[bytes]) -> set[Path]:
    """Return the files in /dev/shm in which the server's children report their load: a killed server leaves them."""
    files: set[Path] = set()
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            files.update(Path(m.path) for m in child.memory_maps() if "/sglang_loads_" in m.path)
    return files


def _hint(log: str) -> str:
    """Return a sentence of advice about a server that has ended by itself, chosen by words in its log."""
    for sign, hint in (
        ("out of memory", "Lower rollout.mem_fraction."),
        ("Not enough memory", "Lower rollout.concurrency or rollout.max_response_tokens."),
        ("No module named 'sglang'", "Install SGLang (docs/installing.md), or set rollout.engine=hf."),
        ("MissingKernelError", "This model needs a kernel this host lacks: use a Qwen or Llama text model."),
        ("are not supported for now", "SGLang does not know this architecture: set rollout.engine=hf."),
        ("SafetensorError", "A weight file of model.path is damaged or cut off."),
        ("unrecognized arguments", "A key of rollout.server_args is no flag of this SGLang."),
    ):
        if sign in log:
            return hint
    return "If nothing is logged, the kernel may have killed it for lack of memory: see `dmesg`."
