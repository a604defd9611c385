"""The client of a vLLM server's HTTP endpoints for administration: pauses, weight updates, scores."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.network import authorization
from rollout_server.engines.http_admin import PROBE, ask

if TYPE_CHECKING:
    from async_rl.base.weights.servers import Bucket

PAUSES = {
    "in_place": "mode=keep&clear_cache=false", "retract": "mode=keep&clear_cache=true",
    "drain": "mode=keep&clear_cache=true", "abort": "mode=abort&clear_cache=true",
}
"""The query of /pause for each weight_sync.on_update. vLLM answers once no forward runs and each sampled token has its
version. clear_cache=true also drops the KV of running requests, which is recomputed when they resume. When `drain`
pauses, only evaluations can still be running."""
GENERATE = "/inference/v1/generate"


class VLLMAdmin:
    """The `ServerAdmin` of a vLLM server. Its methods send HTTP requests and wait for the responses."""

    def __init__(self, config: Config, url: str) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(config.network)
        self._timeouts = config.timeouts
        self._staging = config.weight_sync.double_buffer
        self._version: int | None = None
        """The version of the weights that the server received in this update; None: the last of them are missing."""

    def is_ready(self) -> bool:
        with suppress(WeightSyncError, WaitTimeoutError):
            self.ask("GET", "/health", limit=PROBE)
            return True
        return False

    def serves_model(self, name: str) -> bool:
        """Return whether the server was started with `--served-model-name name`."""
        return name in str(self.ask("GET", "/v1/models"))

    def set_version(self, version: int) -> None:
        """Set the version number that the server reports for its weights."""
        self.ask("POST", "/update_weight_version", {"new_version": str(version)})

    def served_version(self) -> str:
        return str(self.ask("GET", "/weight_info")["weight_version"])

    def pause(self, on_update: str) -> None:
        """Pause generation as weight_sync.on_update says. All policies but `in_place` empty the prefix cache.

        vLLM refuses to pause if it can't empty the cache.
        """
        self.ask("POST", f"/pause?{PAUSES[on_update]}")

    def resume(self) -> None:
        self.ask("POST", "/resume")

    def begin_update(self) -> None:
        self._drop_update()
        self.ask("POST", "/start_weight_update")

    def end_update(self) -> None:
        """Load the received weights. If the last bucket was not received, the push failed: drop all of them."""
        version, self._version = self._version, None
        if version is None:
            self._drop_update()
        else:
            self.ask("POST", "/finish_weight_update", {"weight_version": str(version)})

    def _drop_update(self) -> None:
        self._version = None
        self.ask("POST", "/collective_rpc", {"method": "drop_weight_update"})

    def join_group(
        self, *, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        from async_rl.base.weights.transport import TORCH_WAITS_LONGER_S

        push_s = self._timeouts.push_s
        info = {
            "name": name, "host": host, "port": port, "first_rank": first_rank, "world_size": world_size,
            "backend": backend, "timeout_s": push_s, "torch_limit_s": push_s + TORCH_WAITS_LONGER_S,
        }
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": info})

    def receive_bucket(self, bucket: Bucket, version: int | None, group_name: str) -> None:
        part = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
        self._receive(part | {"staging": self._staging}, version)

    def load_folder(self, folder: Path, version: int | None) -> None:
        self._receive({"folder": str(folder)}, version)

    def _receive(self, part: dict[str, Any], version: int | None) -> None:
        self.ask("POST", "/update_weights", {"update_info": part})
        self._version = version

    def leave_group(self, name: str) -> None:
        self.ask("POST", "/shutdown_weight_transfer_engine")

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        part = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
        self._receive(part | {"memory": share_bucket(bucket)}, version)

    def note_mapped(self, version: int) -> None:
        self._version = version

    def release_memory(self) -> None:
        raise NotImplementedError("a vLLM server can't release memory: its entry in ENGINES has no releases_memory")

    def resume_memory(self, part: Literal["weights", "kv_cache"]) -> None:
        """Do nothing, because `release_memory` releases none."""

    def erase_weights(self) -> None:
        self.ask("POST", "/collective_rpc", {"method": "erase_weights"})

    def unloaded_weights(self) -> list[str]:
        workers = self.ask("POST", "/collective_rpc", {"method": "unloaded_weights"})["results"]
        return sorted({name for names in workers for name in names})

    def value_sums(self) -> tuple[float, float]:
        values, sizes = self.ask("POST", "/collective_rpc", {"method": "value_sums"})["results"][0]
        return float(values), float(sizes)

    def score_tokens(self, tokens: Sequence[int]) -> list[float]:
        body = {
            "token_ids": list(tokens), "cache_salt": f"score-{time.time_ns()}",  # a new salt: no KV of older weights
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            "priority": -1,  # before all replies that wait: their priorities are versions
        }
        entries = self.ask("POST", GENERATE, body)["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[1:], strict=True)]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, limit: Limit | None = None) -> Any:
        """Send a request to the server, wait for the response, and return its JSON, or {} if the response is not JSON.

        Args:
            limit: the longest wait; by default timeouts.push_s.

        Raises:
            WeightSyncError: the server can't be reached, or refused the request.
            WaitTimeoutError: the server did not answer in time.
        """
        return ask(self.url, method, path, self._headers, limit or self._timeouts.limit("push_s"), body)


def share_bucket(bucket: Bucket) -> dict[str, Any]:
    """Return the handle with which a server maps the bucket's memory, as torch.multiprocessing makes it, in JSON.

    Call it once for each server, because torch counts the processes that map the memory.
    """
    storage = bucket.data.untyped_storage()
    if bucket.data.is_cuda:
        _, *handle = storage._share_cuda_()  # without the device's index, which may be another one in the server
    else:
        handle = list(storage._share_filename_cpu_())
        storage._shared_incref()  # type: ignore[attr-defined]  # the server takes this count with it
    words = [base64.b64encode(word).decode() if isinstance(word, bytes) else word for word in handle]
    return {"handle": words, "is_bytes": [isinstance(word, bytes) for word in handle]}
