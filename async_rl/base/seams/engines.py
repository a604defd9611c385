"""The tables of rollout engines and weight transports. Their entries declare what each can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.seams.lookup import implementation

Code = str | Callable[..., Any]
"""A class or function, or its `module:name`."""
UPDATE_POLICIES = ("in_place", "retract", "drain", "abort")
"""The values of weight_sync.on_update."""


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """A rollout engine: its code and its features. rollout_server/engines/base.py describes the code."""

    open: Code
    """(config, index in config.server_names, folder for its logs) -> an `Engine` that is not started yet."""
    open_admin: Code
    """(config, base URL of a server) -> a `ServerAdmin`, with which the learner pauses, updates and resumes the server.
    """
    update_policies: tuple[str, ...]
    """The values of weight_sync.on_update under which every token's version is right."""
    receives: tuple[str, ...]
    """How a server can receive new weights: one way at least. A transport uses one of them.

    nccl, gloo: broadcast of buckets in a process group. shared_memory: buckets to map. folder: a model folder."""
    staging: tuple[str, ...] = ()
    """The values of weight_sync.double_buffer, besides none, with which a server can receive weights while it samples.
    """
    rebuilds_weights: bool = False
    """A server can make whole weights from the parcels of a compact push (weight_sync.lora adapter, weight_sync.delta).
    """
    quantises_by: tuple[str, ...] = ()
    """Flags of the server's program that give its weights fewer bits than the pushed ones have."""
    releases_memory: bool = False
    """A server can free the memory of weights and KV cache while the learner uses the GPU that both share."""
    max_tensor_parallel: int = 1
    """The largest placement.rollout.tp; 0: no limit."""
    attaches_to_url: bool = False
    """A run can use servers that are already running (rollout.server_urls)."""
    computes_in_worker: bool = False
    """The model runs in the worker's own process, not in a process that the engine starts."""
    sets_flags: tuple[str, ...] = ()
    """Flags of the server's program that the engine sets itself, so rollout.server_args must not have them."""
    forbids_tokens: bool = False
    """The engine can exclude tokens from sampling (rollout.forbid_special_tokens); logprobs are then over the others.
    """
    records_support: bool = False
    """The engine can record each token's support, the ids it was drawn from, if rollout.top_p, top_k or min_p
    leave some out, with logprobs over them (GenerationRequest.wants_support)."""
    records_routing: bool = False
    """The engine can record the experts of each token (rollout.routing), if the model has some."""
    parses_tool_calls: bool = False
    """A server has SGLang's parsers of tool calls (rollout.tool_parser), at /parse_function_call."""
    packages: tuple[str, ...] = ()
    """Python packages that the engine needs in addition to the requirements of this project."""
    python: str = ""
    """The default Python of the engine's servers, if `packages` need a separate environment. The path is relative
    to the project's folder."""
    open_chat: Code | None = None
    """(config, name, file for its log) -> a `ServerProcess` for judge.path, not started yet, that answers chats in
    OpenAI's protocol below /v1. None: the engine's servers don't support that."""
    settings: Code | None = None
    """A class with the decorator `section("rollout.params")` of async_rl.base.config.section. Its fields are
    settings under rollout.params, and `config.rollout.settings` is an instance of it. None: no settings."""
    refuses_model: Code | None = None
    """(config) -> why a server can't serve the model in model.path, as a sentence, or "". None: it can serve any."""

    def load(self) -> Callable[..., Any]:
        return implementation(self.open, "rollout.engine")

    def load_admin(self) -> Callable[..., Any]:
        return implementation(self.open_admin, "rollout.engine")

    def load_chat(self) -> Callable[..., Any]:
        if self.open_chat is None:
            raise ValueError("the servers of this engine don't answer chats")
        return implementation(self.open_chat, "judge.engine")

    def server_python(self, chosen: str) -> str:
        """Return the path of the Python that runs the engine's servers: rollout.python, or else the entry's `python`.

        Symbolic links are not resolved: a virtual environment's Python finds its packages by the link's own path.

        Args:
            chosen: the value of rollout.python, perhaps "".
        """
        return os.path.abspath(chosen or Path(__file__).parents[3] / self.python)

    def why_model_refused(self, config: object) -> str:
        """Return why the engine can't serve the model in model.path, as a sentence, or "". It takes less than a second.
        """
        return str(implementation(self.refuses_model, "rollout.engine")(config)) if self.refuses_model else ""


@dataclass(frozen=True, kw_only=True)
class TransportEntry:
    """A weight transport: its code and where it works. async_rl/base/weights/transport.py describes the code."""

    open: Code
    """(config, `Members`, rank, device) -> a `Transport`."""
    delivers: str
    """How servers get the weights: one of the ways in an engine's `receives`."""
    devices: tuple[str, ...]
    """The types of devices that may have the learner's weights: cpu, cuda."""
    needs_one_device: bool = False
    """Each server must share its GPU with a learner rank, or all share one host without GPUs; network.host is on
    loopback."""
    needs_own_gpus: bool = False
    """Each learner rank and each server must have a GPU for itself."""
    settings: Code | None = None
    """A class with the decorator `section("weight_sync.params")` of async_rl.base.config.section. Its fields are
    settings under weight_sync.params, and the transport has an instance of it as `settings`. None: no settings."""
    stages: bool = False
    """Weights are sent through a network, so servers that can stage them need not pause meanwhile."""
    carries_parcels: bool = False
    """Only rank 0 sends, in the transport's `dtype`, so that parcels of a compact push can be sent like weights."""
    writes_files: bool = False
    """The transport writes the weights to two model folders in the run directory."""

    def load(self) -> Callable[..., Any]:
        return implementation(self.open, "weight_sync.transport")


ENGINES: dict[str, EngineEntry] = {
    "sglang": EngineEntry(
        open="rollout_server.engines.sglang.engine:SGLangEngine",
        open_admin="rollout_server.engines.sglang.admin:SGLangAdmin",
        update_policies=UPDATE_POLICIES,
        receives=("nccl", "gloo", "shared_memory", "folder"),
        staging=("device", "host"),
        rebuilds_weights=True,
        quantises_by=("quantization",),
        releases_memory=True,
        records_routing=True,
        max_tensor_parallel=0,
        attaches_to_url=True,
        forbids_tokens=True,
        records_support=True,
        sets_flags=(
            "model-path", "host", "port", "weight-version", "served-model-name", "tp-size", "custom-weight-loader",
            "sampling-mask-max-tokens",
            "enable-return-routed-experts",
        ),
        parses_tool_calls=True,
        packages=("sglang",),
        open_chat="rollout_server.engines.sglang.launch:open_chat_server",
        refuses_model="rollout_server.engines.sglang.launch:why_refused",
    ),
    "vllm": EngineEntry(
        open="rollout_server.engines.vllm.engine:VLLMEngine",
        open_admin="rollout_server.engines.vllm.admin:VLLMAdmin",
        update_policies=UPDATE_POLICIES,
        receives=("nccl", "gloo", "shared_memory", "folder"),
        staging=("device", "host"),
        rebuilds_weights=True,
        quantises_by=("quantization",),
        max_tensor_parallel=0,
        sets_flags=(
            "model", "host", "port", "served-model-name", "tensor-parallel-size", "tokens-only", "generation-config",
            "logprobs-mode", "scheduling-policy", "async-scheduling", "no-async-scheduling", "middleware",
            "worker-extension-cls", "weight-transfer-config",
        ),
        packages=("vllm",),
        python=".venv-vllm/bin/python",
        refuses_model="rollout_server.engines.vllm.engine:refuse_run",
    ),
    "hf": EngineEntry(
        open="rollout_server.engines.hf.engine:HFEngine",
        open_admin="rollout_server.engines.http_admin:HttpAdmin",
        update_policies=UPDATE_POLICIES,
        receives=("nccl", "gloo", "folder"),
        staging=("device",),
        forbids_tokens=True,
        records_support=True,
        records_routing=True,
        rebuilds_weights=True,
        computes_in_worker=True,
    ),
}

TRANSPORTS: dict[str, TransportEntry] = {
    "nccl": TransportEntry(
        open="async_rl.base.weights.transport:open_nccl", delivers="nccl", devices=("cuda",), needs_own_gpus=True,
        stages=True, carries_parcels=True,
    ),
    "gloo": TransportEntry(
        open="async_rl.base.weights.transport:open_gloo", delivers="gloo", devices=("cpu",), stages=True,
        carries_parcels=True,
    ),
    "cuda_ipc": TransportEntry(
        open="async_rl.base.weights.cuda_ipc:CudaIpcTransport", delivers="shared_memory", devices=("cpu", "cuda"),
        needs_one_device=True,
    ),
    "disk": TransportEntry(
        open="async_rl.base.weights.disk:DiskTransport", delivers="folder", devices=("cpu", "cuda"), writes_files=True,
        carries_parcels=True,
    ),
}
"""The weight transports. For weight_sync.transport auto they are tried in this order."""


def working_transports(
    engines: Collection[EngineEntry], device_type: str, *, one_device: bool, own_gpus: bool
) -> list[str]:
    """Return the names of the TRANSPORTS that work with all `engines`, in order. `auto` stands for the first.

    Args:
        device_type: the type of the device with the learner's weights, cpu or cuda; empty: not known.
        one_device: each server shares its GPU with a learner rank, or all share one host without GPUs, and network.host
            is on loopback.
        own_gpus: each learner rank and each server has a GPU for itself.
    """
    return [
        name for name, transport in TRANSPORTS.items()
        if all(transport.delivers in engine.receives for engine in engines)
        and (not device_type or device_type in transport.devices)
        and (one_device or not transport.needs_one_device) and (own_gpus or not transport.needs_own_gpus)
    ]
