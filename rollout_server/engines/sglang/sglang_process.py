"""One SGLang server as a child process: its flags from the config, its port, its start, its end.

No process outlives its parent: the server has the kernel kill it when the thread that started it dies (so
start it from a thread that lives as long as the engine, such as the event loop's), and SGLang's own children
follow.
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
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from async_rl.config import Config
from async_rl.errors import ProcessDiedError, WaitTimeoutError
from async_rl.network import api_key, authorization
from async_rl.storage.model_folder import check_positions
from rollout_server.engines.sglang.launch import API_KEY_VARIABLE, PARENT_VARIABLE

LOG_TAIL_LINES = 20
_START_ATTEMPTS = 3
_RESERVED_TOKENS = 8
"""SGLang keeps a few positions of a context for itself."""
_KV_SHARE = 0.25
"""Of the free memory, for the KV cache on CPU; the learner needs the rest."""

Flags = dict[str, Any]


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int) -> Flags:
    """SGLang's flags but for the port. `model` is the text part of the model's transformers config.

    Raises ConfigError when the configured lengths exceed the model's.
    """
    check_positions(config.model.path, getattr(model, "max_position_embeddings", None), config.longest_tokens)
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model-path": config.model.path, "host": config.network.host, "dtype": dtype, "random-seed": config.run.seed,
        "context-length": config.longest_tokens + _RESERVED_TOKENS,
        "weight-version": "0",
        "skip-tokenizer-init": True,  # tokens in, tokens out: nothing to detokenize
        "sampling-defaults": "openai",  # not the model's generation_config: it narrows the support
        "load-snapshot-publish-interval": 1,  # in decode steps: what /v1/loads says, from which occupancy comes
        "log-level": "warning",
        # With it a forward is under way while the tokens of the one before are read. A pause in place leaves that
        # forward unread: its tokens, of the old weights, would get the new version. The other pauses read it first.
        "disable-overlap-schedule": not on_gpu or config.weight_sync.on_update == "in_place",
    }
    if on_gpu:
        flags |= {"mem-fraction-static": config.rollout.mem_fraction, "tp-size": config.placement.rollout.tp}
        flags |= {"enable-memory-saver": True} if config.takes_turns else {}
        # SGLang takes FA3 on Hopper, which can't compute float32.
        flags |= {"attention-backend": "triton"} if dtype == "float32" else {}
    else:
        flags |= {
            "device": "cpu",
            "skip-server-warmup": True,  # nothing to compile
            "sleep-on-idle": True,  # an idle scheduler would spin on a core the learner needs
            "max-total-tokens": _kv_tokens(config, model, dtype, free_memory_bytes),
        }
    user = {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}
    return flags | user


def _kv_tokens(config: Config, model: Any, dtype: str, free_memory_bytes: int) -> int:
    """Room for every rollout that can be in flight, as far as memory goes, and for one rollout at least."""
    groups = min(config.rollout.concurrency, config.max_slots)
    rollouts = groups * config.rollout.group_size + config.eval.size * config.eval.samples
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    token_bytes = 2 * model.num_hidden_layers * heads * head_dim * (4 if dtype == "float32" else 2)
    affordable = int(_KV_SHARE * free_memory_bytes / config.placement.servers_per_node / token_bytes)
    return max(config.longest_tokens + _RESERVED_TOKENS, min(rollouts * config.longest_tokens, affordable))


def command_line(flags: Flags) -> list[str]:
    """`--key value ...`; True is a bare flag, False leaves the flag away, a list is several values, a dict is
    JSON.
    """
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
    """A port nobody listens on now, below the range from which the kernel serves outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port


def cuda_runtime_folders() -> list[str]:
    """Where wheels have put libcudart."""
    nvidia = importlib.util.find_spec("nvidia")  # a namespace: many wheels, in one or more site-packages
    roots = nvidia.submodule_search_locations if nvidia else None
    return sorted({str(file.parent) for root in roots or () for file in Path(root).glob("*/lib/libcudart.so.*")})


class ServerProcess:
    """`rollout_server.launch` with the given flags. `url` is valid after `start`."""

    def __init__(self, name: str, flags: Flags, threads: int, log_file: Path, config: Config) -> None:
        self.name = name
        self.url = ""
        self.log_file = log_file
        self._flags = flags
        self._timeouts = config.timeouts
        self._network = config.network
        self._environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), API_KEY_VARIABLE: api_key(config.network)}
        # A context length is longer than the model's by the tokens SGLang reserves, at most; it refuses
        # without this.
        self._environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        # A server that closes an idle connection, after 5 s, may do so while the next request is on its way there.
        # The clients close theirs after 15 s.
        self._environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "60"
        self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        # SGLang calls `ninja` to build kernels: of this environment, also where nobody has activated it.
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        self._environment["PATH"] = os.pathsep.join(programs)
        if flags["dtype"] == "float32":  # else Triton rounds what it multiplies to 10 bits of mantissa (TF32)
            self._environment.setdefault("TRITON_F32_DEFAULT", "ieee")
        if "enable-memory-saver" in flags:
            # It is loaded before Python is, which alone knows where a CUDA runtime from wheels lies.
            folders = [os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders()]
            self._environment["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        self._process: subprocess.Popen[bytes] | None = None
        self._left_behind: set[Path] = set()
        self._log_start_bytes = 0

    async def start(self) -> None:
        """Returns once the server answers. A port that another process took meanwhile is replaced.

        Raises ProcessDiedError with the log's last lines, or WaitTimeoutError after
        `timeouts.server_start_s`.
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            port, identity = free_port(self._network.host), f"async-rl-{uuid.uuid4().hex}"
            self.url = f"http://{self._network.host}:{port}"
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
        """Raises ProcessDiedError, with the log's last lines and a hint, if the server has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ProcessDiedError(
                f"{self.name} ended by itself ({how}). {_hint(self._log())}\nlast lines of {self.log_file}:\n"
                + self.log_tail()
            )

    def log_tail(self) -> str:
        return "\n".join("    " + line for line in self._log().splitlines()[-LOG_TAIL_LINES:])

    async def aclose(self) -> None:
        """Ends the server and its children at once; it holds nothing that is worth a polite end (which takes
        5 s).
        """
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end_session, process, self._timeouts.shutdown_s)
            shutil.rmtree(self._scratch, ignore_errors=True)
            for file in self._left_behind:
                file.unlink(missing_ok=True)

    def _spawn(self, flags: Flags) -> subprocess.Popen[bytes]:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.mkdtemp(prefix="async-rl-sglang-")  # for its sockets, which it leaves behind
        with self.log_file.open("ab") as log:
            self._log_start_bytes = log.tell()
            return subprocess.Popen(
                [sys.executable, "-m", "rollout_server.engines.sglang.launch", *command_line(flags)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment | {"TMPDIR": self._scratch},
                cwd=Path(__file__).parents[3],
                start_new_session=True,  # Ctrl-C is for the driver, which then ends the server
            )

    async def _wait_ready(self, identity: str) -> None:
        timeout_s, headers = self._timeouts.server_start_s, authorization(self._network)
        try:
            async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(timeout_s):
                while not await self._answers(session, identity):
                    self.check_alive()
                    await asyncio.sleep(0.1)  # another program's start gives no event to wait for
        except TimeoutError:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s (timeouts.server_start_s) for {self.name} "
                "to start\n"
                f"last lines of {self.log_file}:\n{self.log_tail()}"
            ) from None

    async def _answers(self, session: aiohttp.ClientSession, identity: str) -> bool:
        """True if our server is ready, and not one of another run that has taken the port.

        Leaves what it has imported out of garbage collection, which would walk it for 0.3 s at a time.
        (SGLang does so after its warm-up, which on CPU is left out.)
        """
        with suppress(aiohttp.ClientError):
            async with session.get(f"{self.url}/ready") as ready:
                if ready.status != 200:
                    return False
            async with session.get(f"{self.url}/v1/models") as models:
                if identity not in await models.text():
                    return False
            async with session.post(f"{self.url}/freeze_gc"):
                return True
        return False

    def _log(self) -> str:
        with self.log_file.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")


def _end_session(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Kill the server; the kernel then ends its children, and Python's resource tracker tidies up after them.
    """
    process.kill()
    process.wait(timeout_s)
    deadline_s = time.monotonic() + 1.0
    while _is_running(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_running(session: int) -> bool:
    """Does any process of the session run? (One that has ended but isn't yet reaped by its parent doesn't.)
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _shared_memory_of(process: subprocess.Popen[bytes]) -> set[Path]:
    """Files of the schedulers' load reports, which they leave behind."""
    files: set[Path] = set()
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            files.update(Path(m.path) for m in child.memory_maps() if "/sglang_loads_" in m.path)
    return files


def _hint(log: str) -> str:
    """What most likely helps, from what the server said last."""
    for sign, hint in (
        ("out of memory", "Lower rollout.mem_fraction."),
        ("Not enough memory", "Lower rollout.concurrency or rollout.max_response_tokens."),
        ("No module named 'sglang'", "Install SGLang (README), or set rollout.engine=hf."),
        ("MissingKernelError", "This model needs a kernel this host lacks: use a Qwen or Llama text model."),
        ("are not supported for now", "SGLang does not know this architecture: set rollout.engine=hf."),
        ("SafetensorError", "A weight file of model.path is damaged or cut off."),
        ("unrecognized arguments", "A key of rollout.server_args is no flag of this SGLang."),
    ):
        if sign in log:
            return hint
    return "If nothing is logged, the system may have ended it for memory: see `dmesg`."
