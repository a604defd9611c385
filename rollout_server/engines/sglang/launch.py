"""The launch of an SGLang server, from top to bottom.

    in the worker     why_refused             can SGLang serve this model?
                      server_flags            the config becomes flags; chat_server_flags: for a judge
                      server_environment      environment variables
                      sglang_process          the process: python -m rollout_server.engines.sglang.launch <flags>
    in the server     die_with_parent         ends with the worker
                      import_stubs.install    for packages that this host lacks
                      main                    SGLang's own server
                      run_scheduler           SGLang's scheduler, with the changes of server_changes.py

SGLang starts child processes by multiprocessing, which imports this file in each of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.host import server_threads
from async_rl.base.models_and_data.experts import experts_of, recorded_experts
from async_rl.base.network import api_key
from async_rl.base.seams.lookup import doc_page
from rollout_server.engines.base import graph_replies, kv_token_bytes, kv_tokens
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.server_process import ServerProcess, command_line, free_port
from rollout_server.engines.sglang import import_stubs
from rollout_server.engines.sglang.admin import BASE_VARIABLE, SWAP

_READ_FROM_CONFIG = {"Gemma2ForCausalLM": "hidden_act"}
"""By architecture: a key of config.json that SGLang needs and that transformers 5 does not write."""
_ALL_SPARSE = ("Qwen3MoeForCausalLM",)
"""The architectures that SGLang 0.5.21 builds with experts in every layer, whatever the config says."""
_UNREADABLE = "gpt-oss"
"""A parser that can't be used, because it needs more text than the reply: `<|start|>assistant`, which the template
writes, and the end token `<|call|>`."""
_RESERVED_TOKENS = 8
"""The number of positions of a context that SGLang keeps for itself."""
_POLICIES_WITH_PRIORITY = ("fcfs", "lof")
"""The values of SGLang's schedule-policy that support priorities."""
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
    ("No module named 'sglang'", f"Install SGLang ({doc_page('how-to/install.md')}), or set rollout.engine=hf."),
    ("MissingKernelError", "This model needs a kernel this host lacks: use a Qwen or Llama text model."),
    ("are not supported for now", "SGLang does not know this architecture: set rollout.engine=hf."),
    ("SafetensorError", "A weight file of model.path is damaged or cut off."),
    ("Could not find CUDA installation", _BUILDS), ("nvcc", _BUILDS), ("ninja", _BUILDS),
    ("unrecognized arguments", "A key of rollout.server_args is no flag of this SGLang."),
)
SUPPORT_BYTES = 2**31
"""The most memory that a server may use for supports when every reply samples one token."""
CPU_CACHE_TOKENS = 2**15
"""The size of the KV cache of a server on a CPU, in tokens."""
PARENT_VARIABLE = "ASYNC_RL_PARENT_PID"
"""The environment variable with the parent's process id. If it is set, the server ends when the parent ends."""
API_KEY_VARIABLE = "ASYNC_RL_SERVER_KEY"
"""The environment variable with the server's API key. On the command line every user of the host could read it."""
_PR_SET_PDEATHSIG = 1

Flags = dict[str, Any]


def why_refused(config: Config) -> str:
    """Return why SGLang can't serve the model in model.path, as a part of a sentence; "" if it can."""
    import transformers

    flags = {key.replace("_", "-") for key in config.rollout.server_args}
    packed = flags & {"quantization", "speculative-algorithm", "dp-size"}
    if config.weight_sync.double_buffer != "none" and packed:
        return (
            f"it can't stage weights (weight_sync.double_buffer) with {', '.join(sorted(packed))} in "
            "rollout.server_args: only one model with unpacked weights has a second set of them"
        )
    if config.records_support and "speculative-algorithm" in flags:
        return (
            "with speculative-algorithm in rollout.server_args it does not say which tokens rollout.top_p, top_k and "
            "min_p keep. Set algorithm.support: ignore, or leave it out"
        )
    if "speculative-algorithm" in flags and recorded_experts(config):
        return (
            "with speculative-algorithm in rollout.server_args nobody has compared the experts that it records "
            "(rollout.routing replay) with those that sampled the tokens. Leave it out, or set rollout.routing: ignore"
        )
    if _user_flags(config).get("chunked-prefill-size") == -1 and recorded_experts(config):
        return (
            "it can't record experts (rollout.routing replay) with chunked-prefill-size -1 in rollout.server_args: its "
            "record has too few rows. Leave it out, or set rollout.routing: ignore"
        )
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        gpu = "pip install 'async-rl[sglang-gpu]'"
        page = doc_page("how-to/install.md")
        return f"it is not installed. With a GPU: {gpu}; else see {page}, or set rollout.engine: hf"
    srt = Path(sglang.submodule_search_locations[0]) / "srt"
    if reason := _why_parser_refused(config.rollout.tool_parser, srt):
        return reason
    model = transformers.AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    if reason := _why_supports_refused(config, int(model.get_text_config().vocab_size)):
        return reason
    if not model.architectures:
        return ""
    name = model.architectures[0]
    files = (srt / "models").glob("*.py")
    entries = (file.read_text(encoding="utf-8").partition("\nEntryClass")[2] for file in files)
    if not any(re.search(rf"\b{name}\b", entry) for entry in entries):
        substitute = getattr(transformers, name, None)  # which SGLang runs instead, if it can
        if substitute is None or not substitute.is_backend_compatible():
            return f"it has no implementation of {name}, and can't run that of transformers. Set rollout.engine: hf"
    if config.weight_sync.double_buffer != "none" and getattr(model, "quantization_config", None):
        return "its weights are quantised, and those can't be staged. Set weight_sync.double_buffer: none"
    if name in _ALL_SPARSE and (experts := experts_of(config.model.path)):
        dense = sorted(set(range(model.get_text_config().num_hidden_layers)) - set(experts.layers))
        if dense:
            return (
                f"its {name} has experts in every layer, but layers {', '.join(map(str, dense))} of this model have "
                "none (mlp_only_layers, decoder_sparse_step): it would compute other numbers. Set rollout.engine: hf"
            )
    key = _READ_FROM_CONFIG.get(name, "")
    if key and not hasattr(model, key):
        return f"its {name} needs the key {key} in config.json. Add the key, or set rollout.engine: hf"
    return ""


def _why_parser_refused(name: str, srt: Path) -> str:
    """Return why SGLang can't parse tool calls with rollout.tool_parser `name`, as a part of a sentence; "" if it can.
    """
    if not name or ":" in name:
        return ""
    text = (srt / "function_call" / "parser_names.py").read_text(encoding="utf-8")
    names = re.findall(r'^ +"([^"]+)",$', text.partition("TOOL_CALL_PARSER_NAMES")[2], re.MULTILINE)
    known = [each for each in names if each != _UNREADABLE]
    if name in known:
        return ""
    why = "needs more than the text of a reply" if name == _UNREADABLE else "is none of its parsers of tool calls"
    return f"rollout.tool_parser {name!r} {why}. Set one of {', '.join(known)}, or module:name, a parser of yours"


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int, seed: int) -> Flags:
    """Return SGLang's flags {name: value} without the port. Flags in rollout.server_args take precedence.

    Args:
        model: the text part of the model's transformers config.
        free_memory_bytes: the host's free memory, a share of which the KV cache may use.
        seed: the server's random seed.
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
        **({"sampling-mask-max-tokens": most_support_ids(config, model.vocab_size)} if config.records_support else {}),
        # With speculative decoding server_changes.py does not know how many tokens of a forward count.
        "disable-overlap-schedule": not on_gpu or (config.weight_sync.on_update == "in_place" and _speculates(config)),
    }
    flags |= {"enable-return-routed-experts": True} if recorded_experts(config) else {}
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


def most_support_ids(config: Config, vocabulary: int) -> int:
    """Return the largest number of ids in a token's support: rollout.top_k, or the vocabulary size if it is 0."""
    return min(config.rollout.top_k or vocabulary, vocabulary)


def _why_supports_refused(config: Config, vocabulary: int) -> str:
    """Return why the supports of a run don't fit into a server's memory, as a part of a sentence; "" if they do.

    For each reply that it samples, a server takes 8 bytes per possible id: 4 for the id and 4 for a weight.
    """
    replies = min(config.rollout.max_groups_in_flight, config.slots) * config.rollout.group_size
    if not config.records_support or 8 * replies * most_support_ids(config, vocabulary) <= SUPPORT_BYTES:
        return ""
    return (
        f"the ids that tokens of {replies} replies are drawn from (algorithm.support replay) would take more than "
        f"{SUPPORT_BYTES >> 30} GiB on it. Set rollout.top_k: {SUPPORT_BYTES // (8 * replies)} or less, which leaves "
        "out hardly anything, or lower rollout.max_groups_in_flight"
    )


def _user_flags(config: Config) -> Flags:
    return {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}


def _speculates(config: Config) -> bool:
    return "speculative-algorithm" in _user_flags(config)


def chat_server_flags(config: Config, *, on_gpu: bool) -> Flags:
    """Return SGLang's flags {name: value} for a judge's server, without the port. judge.server_args take precedence."""
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


def server_environment(config: Config, flags: Flags) -> dict[str, str]:
    """Return the environment of the server's process: a copy of this process's, with SGLang's variables set."""
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


def cuda_runtime_folders() -> list[str]:
    """Return the folders where Python packages have installed the CUDA runtime, libcudart; [] if there are none."""
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package of many wheels, in one or more site-packages
    roots = nvidia.submodule_search_locations if nvidia else None
    return sorted({str(file.parent) for root in roots or () for file in Path(root).glob("*/lib/libcudart.so.*")})


def sglang_process(name: str, flags: Flags, log_file: Path, config: Config) -> ServerProcess:
    """Return a `ServerProcess` for an SGLang server with these flags, not started yet."""
    identity = f"async-rl-{uuid.uuid4().hex}"
    words = command_line(flags | {"served-model-name": identity})

    def is_ready(url: str) -> bool:
        """Return whether the server at `url` is ready and this one, not another run's. If so, freeze its objects, see
        `HttpAdmin.freeze_garbage_collection`.
        """
        admin = HttpAdmin(config, url)
        with suppress(WeightSyncError, WaitTimeoutError):
            if admin.has_started() and admin.serves_model(identity):
                admin.freeze_garbage_collection()
                return True
        return False

    return ServerProcess(
        name, log_file, config, is_ready=is_ready, hints=HINTS,
        environment=server_environment(config, flags),
        command=lambda port: [
            sys.executable, "-m", "rollout_server.engines.sglang.launch", *words,
            *command_line({"port": port} | _own_rendezvous(config, flags, port)),
        ],
        shared_files=("sglang_loads_*", "sem.mp-*"),  # SGLang's reports of its load, and its semaphores
    )


def _own_rendezvous(config: Config, flags: Flags, port: int) -> Flags:
    """Return the flag for the port where the server's own processes meet, chosen from network.ports.

    Without the flag SGLang takes any free port of the kernel's range. {} if network.ports is not set.

    Args:
        port: the port that the server listens on.
    """
    others = [each for each in config.network.port_range if each != port]
    if not others or "nccl-port" in flags:
        return {}
    return {"nccl-port": free_port(config.network.host, others)}


def open_chat_server(config: Config, name: str, log_file: Path) -> ServerProcess:
    """Return a `ServerProcess` that serves the judge's model (judge.path), not started yet."""
    import torch

    flags = chat_server_flags(config, on_gpu=torch.cuda.is_available())
    return sglang_process(f"SGLang server {name}", flags, log_file, config)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, even by SIGKILL. Its child processes will be killed too.

    The environment variable PARENT_VARIABLE names the parent. Without it, the process outlives its parent.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes that this one starts end with it


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler, which owns the model, with this project's changes to it."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from rollout_server.engines.sglang import server_changes

    server_changes.install()
    run_scheduler_process(*args, **kwargs)


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        key = os.environ.pop(API_KEY_VARIABLE, "")
        server_args = prepare_server_args(sys.argv[1:] + (["--api-key", key] if key else []))
        server_args.resolve_once()
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # only in processes of the server, not where this module is imported
    die_with_parent()
    import_stubs.install()

if __name__ == "__main__":
    main()
