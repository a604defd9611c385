"""The client of SGLang's HTTP endpoints for administration: pauses, weight updates, scores.

The hf engine serves the endpoints that weight pushes need, so this client administers it too. Every `ServerAdmin` of
an HTTP server uses the function `ask`, which sends one request and reads a JSON response.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.network import authorization

if TYPE_CHECKING:
    from async_rl.base.weights.servers import Bucket

ERASE, UNLOADED, SUMS, VALUE_SUMS = "erase", "unloaded", "sums", "value_sums"
"""Actions of /weights_checker that our servers add to SGLang's own: see sglang/server_changes.py."""
PAUSE_MODES = {"in_place": "in_place", "retract": "retract", "drain": "retract", "abort": "abort"}
"""SGLang's pause mode for each weight_sync.on_update. When `drain` pauses, only evaluations can still be running."""
PROBE = Limit(3.0, "of a probe")
FLUSH_S = 30
"""The time that SGLang waits for aborted requests to end before it flushes its cache."""
RELEASED = ("weights", "kv_cache")
"""The memory that a server can release. To release CUDA graphs too, SGLang would need non-default graphs."""


class HttpAdmin:
    """The `ServerAdmin` of an SGLang server. Each method sends one HTTP request and waits for the response."""

    def __init__(self, config: Config, url: str) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(config.network)
        self._push_limit = config.timeouts.limit("push_s")
        self._released: tuple[str, ...] = ()

    def is_ready(self) -> bool:
        return self._answers("/model_info")  # SGLang's /ready answers 503 while the server is paused

    def has_started(self) -> bool:
        """Return whether the server accepts requests: it has warmed up and is not paused."""
        return self._answers("/ready")

    def _answers(self, path: str) -> bool:
        with suppress(WeightSyncError, WaitTimeoutError):
            self.ask("GET", path, limit=PROBE)
            return True
        return False

    def serves_model(self, name: str) -> bool:
        """Return whether the server was started with `--served-model-name name`."""
        return name in str(self.ask("GET", "/v1/models"))

    def server_info(self) -> dict[str, Any]:
        """Return the server's command-line arguments and its state."""
        return dict(self.ask("GET", "/server_info"))

    def served_version(self) -> str:
        return str(self.ask("GET", "/model_info").get("weight_version"))

    def freeze_garbage_collection(self) -> None:
        """Make the server's garbage collector skip all objects that exist now. Scanning them takes 0.3 s each time."""
        self.ask("POST", "/freeze_gc")

    def pause(self, on_update: str) -> None:
        """Pause generation as weight_sync.on_update says.

        All policies except `in_place` drop the KV and the prefix cache. While requests are paused in place, a server
        refuses to flush its cache, and crashes if an update asks for a flush.
        """
        mode = PAUSE_MODES[on_update]
        self.ask("POST", "/pause_generation", {"mode": mode})
        if mode == "retract":
            self.ask("POST", "/flush_cache", {})
        elif mode == "abort":  # an aborted request may take a moment to end
            self.flush_when_idle()

    def flush_when_idle(self) -> None:
        """Empty the server's prefix cache once no request is running.

        Raises:
            WeightSyncError: a request was still running after FLUSH_S.
        """
        self.ask("POST", f"/flush_cache?timeout={FLUSH_S}", {})

    def abort_all(self) -> None:
        """End all running requests. The response of each has the tokens sampled so far."""
        self.ask("POST", "/abort_request", {"abort_all": True})

    def resume(self) -> None:
        self.ask("POST", "/continue_generation", {})

    def begin_update(self) -> None:
        self.ask("POST", "/begin_weight_update", {})

    def end_update(self) -> None:
        self.ask("POST", "/end_weight_update", {})

    def join_group(
        self, *, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        body = {
            "master_address": host, "master_port": port, "rank_offset": first_rank, "world_size": world_size,
            "group_name": name, "backend": backend,
        }
        self.ask("POST", "/init_weights_update_group", body)

    def receive_bucket(self, bucket: Bucket, version: int | None, group_name: str) -> None:
        layout = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": group_name}
        body = {"load_format": "flattened_bucket", **update_fields(version)}
        self.ask("POST", "/update_weights_from_distributed", layout | body)

    def leave_group(self, name: str) -> None:
        self.ask("POST", "/destroy_weights_update_group", {"group_name": name})

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        from async_rl.base.weights.cuda_ipc import share_bucket

        tensors = [share_bucket(bucket)]  # shared anew for each server, because torch counts who maps the memory
        body = {"serialized_named_tensors": tensors, "load_format": "flattened_bucket", **update_fields(version)}
        self.ask("POST", "/update_weights_from_tensor", body)

    def note_mapped(self, version: int) -> None:
        """Do nothing: the server keeps the version that was sent with the last weights."""

    def load_folder(self, folder: Path, version: int | None) -> None:
        self.ask("POST", "/update_weights_from_disk", {"model_path": str(folder), **update_fields(version)})

    def release_memory(self) -> None:
        self.ask("POST", "/pause_generation", {"mode": "retract"})
        self.ask("POST", "/release_memory_occupation", {"tags": RELEASED})
        self._released = RELEASED

    def resume_memory(self, part: str) -> None:
        if part in self._released:  # a server dies if it is asked to resume memory that it has not released
            self.ask("POST", "/resume_memory_occupation", {"tags": [part]})
            self._released = tuple(tag for tag in self._released if tag != part)

    def erase_weights(self) -> None:
        self.ask("POST", "/weights_checker", {"action": ERASE})

    def unloaded_weights(self) -> list[str]:
        ranks = self.ask("POST", "/weights_checker", {"action": UNLOADED})["ranks"]
        return sorted({name for rank in ranks for name in rank["checksums"]})

    def value_sums(self) -> tuple[float, float]:
        found = self.ask("POST", "/weights_checker", {"action": VALUE_SUMS})["ranks"][0]["checksums"]
        return float(found["values"]), float(found["sizes"])

    def sums_of_weights(self) -> dict[str, str]:
        """Return a checksum of each weight's bits: {the server's name of the weight: checksum}. See parcels.py.

        If the server spans several GPUs, only the weights of its first rank are included.
        """
        sums: dict[str, str] = self.ask("POST", "/weights_checker", {"action": SUMS})["ranks"][0]["checksums"]
        return sums

    def score_tokens(self, tokens: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True, "logprob_start_len": 0,
            "extra_key": f"score-{time.time_ns()}",  # a new key, so that no KV of older weights is reused
            "priority": -1,  # before all replies that wait: their priorities are versions
        }
        response = self.ask("POST", "/generate", body)
        return [entry[0] for entry in response["meta_info"]["input_token_logprobs"]][1:]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, limit: Limit | None = None) -> Any:
        """Send a request to the server, wait for the response, and return its JSON, or {} if the response is not JSON.

        Args:
            limit: the longest wait; by default timeouts.push_s.

        Raises:
            WeightSyncError: the server can't be reached, or refused with another HTTP status than 200 or `success:
                false`.
            WaitTimeoutError: the server did not answer in time.
        """
        reply = ask(self.url, method, path, self._headers, limit or self._push_limit, body)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise WeightSyncError(f"the SGLang server refused {self.url}{path}: {reply.get('message', '')[:300]}")
        return reply


def update_fields(version: int | None) -> dict[str, Any]:
    """Return the JSON fields of each request that carries weights: keep the prefix cache; `version`, unless it is None.
    """
    return {"flush_cache": False} | ({} if version is None else {"weight_version": str(version)})


def ask(
    base_url: str, method: str, path: str, headers: dict[str, str], limit: Limit, body: dict[str, Any] | None = None
) -> Any:
    """Send one request, wait for the response, and return its JSON, or {} if the response is not JSON.

    Raises:
        WeightSyncError: the server can't be reached, or answered with another HTTP status than 200.
        WaitTimeoutError: the server did not answer within `limit`.
    """
    url = urlsplit(base_url)
    connection_type = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = connection_type(url.netloc, timeout=limit.seconds)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, url.path + path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        raise WaitTimeoutError(f"waited {limit} for the rollout server to answer {base_url}{path}") from None
    except (OSError, HTTPException) as error:
        raise WeightSyncError(
            f"{base_url}{path}: {type(error).__name__}: {error}: is the rollout server still alive?"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise WeightSyncError(f"the rollout server at {base_url}{path} answered {response.status}: {text[:600]}")
    try:
        return json.loads(text)
    except ValueError:
        return {}
