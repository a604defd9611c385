"""The base class of engines that get their replies from a server process over HTTP: SGLang and vLLM.

With `weight_sync.on_update: abort` a push ends all requests. The engine keeps the tokens sampled so far and requests
the rest, sending prompt and tokens again. The server answers after the push, which has emptied the prefix cache, so all
of the KV is computed with the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ProcessDiedError
from async_rl.base.models_and_data.model_folder import end_tokens
from async_rl.base.network import authorization
from async_rl.base.types import IntArray, RoutingArray
from rollout_server.engines.base import GenerationRequest, PartialReply, Purpose, SampledReply, check_prompt
from rollout_server.engines.server_process import ServerProcess, server_seed

LOAD_TIMEOUT_S = 2.0


class HttpEngine(ABC):
    """An `Engine` that gets its replies from a server process. The subclass knows the server's program and endpoints.
    """

    def __init__(self, config: Config, index: int, log_dir: Path, program: str) -> None:
        self.url = ""
        self.vocab_size = 0
        self._config = config
        name = config.server_names[index]
        self._name = f"{program} server {name}"
        self._log_file = log_dir / f"{program.lower()}-{name.replace('/', '-')}.log"
        self._seed = server_seed(config.run.seed, index, self._log_file)
        self.server: ServerProcess | None = None
        """The server process; None if the run uses the server at rollout.server_urls."""
        self.resubmits = config.weight_sync.on_update == "abort"
        self._attempts = itertools.count()
        self._newest = 0
        """The newest start version of a request so far."""
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        """Start the server, or attach to the one at rollout.server_urls; return when it serves version 0.

        Raises:
            ConfigError: the server can't be used with this configuration.
            ProcessDiedError: the server ended. The message has the last lines of its log.
            WaitTimeoutError: the server did not answer in time.
            WeightSyncError: the server at rollout.server_urls can't be used.
        """
        model, self.end_tokens, on_gpu = await asyncio.to_thread(_inspect, self._config.model.path)
        self.vocab_size = int(model.vocab_size)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
            headers=authorization(self._config.network),
        )
        self._aborting = asyncio.create_task(self._abort_cancelled())
        await self.open_server(model, on_gpu)

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        """Wait for the server to sample `request.n` replies, and return them.

        Cancelling the call ends its requests there.

        Raises:
            ValueError: the prompt has no tokens, or a token outside the vocabulary.
            ProcessDiedError: the server broke the connection.
            AsyncRLError: the server refused the request, ended a reply early, or sent an incomplete response.
        """
        check_prompt(request.prompt, self.vocab_size)
        replies = [OpenReply(sample=sample) for sample in range(request.n)]
        while open_replies := [reply for reply in replies if not reply.finish_reason]:
            await self._extend(request, open_replies)
        return [reply.reply() for reply in replies]

    @abstractmethod
    async def open_server(self, model: Any, on_gpu: bool) -> None:
        """Start the server or attach to a running one, and set `url`.

        Args:
            model: the text part of the model's transformers config.
            on_gpu: whether this host has a GPU.
        """

    @abstractmethod
    async def _extend(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        """Request the tokens that `replies` still lack, and append them.

        After an abort by a push some replies stay unfinished.
        """

    @abstractmethod
    def _abort_request(self, request_id: str) -> tuple[str, dict[str, Any]]:
        """Return (path, body) of the POST request that ends request `request_id` on the server."""

    def priority(self, request: GenerationRequest) -> int:
        """Return the priority of a request; the server runs lower numbers first.

        Groups with the nearest deadline come first. An evaluation has no deadline: it runs after all groups admitted so
        far, but before groups of later versions. Otherwise it would wait for ever at a full server.
        """
        self._newest = max(self._newest, request.start_version)
        return self._newest + 1 if request.purpose is Purpose.EVALUATION else request.start_version

    async def post(self, path: str, body: dict[str, Any], request_ids: Sequence[str], key: str) -> Any:
        """Send a request for replies, and return the JSON of the response.

        Cancelling the call ends the request on the server.

        Args:
            request_ids: the ids of the server's requests, to end them.
            key: the GenerationRequest's key, for error messages.

        Raises:
            ProcessDiedError: the server broke the connection.
            AsyncRLError: the server refused the request; the message has its text.
        """
        try:
            async with self.session.post(self.url + path, json=body) as response:
                if response.status != 200:
                    raise AsyncRLError(
                        f"{self._name} refused request {key} (HTTP {response.status}): {(await response.text())[:500]}"
                    )
                return await response.json()
        except asyncio.CancelledError:
            for request_id in request_ids:
                self.cancelled.put_nowait(request_id)
            raise
        except aiohttp.ClientError as error:
            await asyncio.sleep(0.5)  # a dying server closes its connections before its process has ended
            if self.server is not None:
                self.server.check_alive()
            raise ProcessDiedError(f"{self._name} at {self.url} broke the connection: {error!r}") from error

    async def _abort_cancelled(self) -> None:
        """End on the server each request whose caller was cancelled. Runs as a task as long as the engine."""
        while True:
            path, body = self._abort_request(await self.cancelled.get())
            timeout = aiohttp.ClientTimeout(total=self._config.timeouts.buffer_s)
            # A server that is gone has no request left to end, and its other callers raise their own errors.
            with suppress(TimeoutError, aiohttp.ClientError):
                async with self.session.post(self.url + path, json=body, timeout=timeout):
                    pass
            self.cancelled.task_done()

    async def _get_text(self, path: str) -> str | None:
        """Return the response text of GET `path`; None if the server refuses or takes longer than LOAD_TIMEOUT_S."""
        with suppress(TimeoutError, aiohttp.ClientError):
            timeout = aiohttp.ClientTimeout(total=LOAD_TIMEOUT_S)
            async with self.session.get(self.url + path, timeout=timeout) as response:
                return await response.text() if response.status == 200 else None
        return None

    async def aclose(self) -> None:
        if hasattr(self, "session"):
            self._aborting.cancel()
            await self.session.close()
        if self.server is not None:
            await self.server.aclose()


def cache_key(request: GenerationRequest) -> str:
    """Return the prefix-cache key of a request. A request reuses KV only from requests with the same key.

    All requests of a group share a key, so an episode's next turn finds the KV of its history. Each held-out prompt and
    each greedy baseline has its own key.

    The key contains no policy version: a request may wait at the server until a push is done, so nobody knows which
    weights will compute it. Instead every pause for a push empties the server's prefix cache, and the server computes
    nothing until it has the new weights. The exception is `in_place`, which keeps the cache: a turn may begin on KV of
    older weights, as the rest of a reply does after such a push. `Group.old_kv` flags both.
    """
    return request.key


def _inspect(path: str) -> tuple[Any, list[int], bool]:
    """Read what `start` needs before it starts a server for the model in folder `path`.

    Returns the text part of its transformers config, its end tokens, and whether this host has a GPU.
    """
    import torch
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config(), end_tokens(path), torch.cuda.is_available()


@dataclass(slots=True, kw_only=True)
class OpenReply(PartialReply):
    """A reply that a server is still sampling. It takes several requests only if weight pushes abort the earlier ones.
    """

    def add_routing(self, routing: RoutingArray) -> None:
        """Append the experts of the tokens that have none recorded yet.

        After an abort the server recomputes earlier tokens, perhaps with newer weights; their first experts are kept.

        Args:
            routing: the experts of all tokens so far except the last.
        """
        self.fed.append(routing[sum(map(len, self.fed)) :])

    def extend(
        self, tokens: list[int], logprobs: list[float], spans: list[dict[str, Any]] | None, end: str,
        sets: list[list[int]] | None = None, set_logprobs: list[list[float]] | None = None, *, max_tokens: int,
        end_tokens: Sequence[int], may_abort: bool,
    ) -> None:
        """Append the tokens that one request has sampled, and set finish_reason if the reply has ended.

        Args:
            spans: the server's weight_versions; see token_versions.
            end: why the request ended: `stop` (by an end token), `length` or `abort`. Anything else is an error.
            sets: the ids that each token was drawn from; None: the request does not want them.
            set_logprobs: the logprobs of the ids in `sets`; None: the request does not want them.
            max_tokens: the longest reply.
            may_abort: whether a push may abort requests.

        Raises:
            AsyncRLError: the response is incomplete, or ended for another reason than stop, length or a permitted
                abort.
        """
        aborted = end == "abort"
        if not (tokens or aborted) or len(logprobs) != len(tokens) or None in logprobs:
            raise AsyncRLError(
                "the rollout server must send one logprob for each token, "
                f"got {len(tokens)} tokens and logprobs {logprobs[:20]}"
            )
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += token_versions(spans, len(tokens)).tolist()
        if sets is not None:
            self.sets += checked_sets(tokens, sets)
        if set_logprobs is not None:
            orders = [np.unique(np.array(ids, np.int32), return_index=True)[1] for ids in sets or ()]
            self.set_logprobs += [
                np.array(values, np.float32)[order] for values, order in zip(set_logprobs, orders, strict=True)
            ]
        if end == "stop" or (aborted and tokens and tokens[-1] in end_tokens):  # an abort can come with the last token
            self.finish_reason = "stop"
        elif end == "length" or (aborted and len(self.tokens) == max_tokens):
            self.finish_reason = "length"
        elif not (aborted and may_abort):
            raise AsyncRLError(
                f"the rollout server did not finish a reply: finish_reason {end}. Its log in run_dir/logs may say why"
            )


def checked_sets(tokens: list[int], sets: list[list[int]]) -> list[npt.NDArray[np.int32]]:
    """Check the ids that the server drew each token from (its support), and return them in ascending order.

    Raises:
        AsyncRLError: the number of sets differs from the number of tokens, or a set lacks its own token.
    """
    if len(sets) != len(tokens) or any(token not in ids for token, ids in zip(tokens, sets, strict=True)):
        raise AsyncRLError(
            "the rollout server must send the ids that each token was drawn from, the token among them, got "
            f"{len(sets)} sets for {len(tokens)} tokens. Set algorithm.support: ignore, or rollout.top_p 1, top_k 0 "
            "and min_p 0"
        )
    return [np.unique(np.array(ids, np.int32)) for ids in sets]


def token_versions(spans: list[dict[str, Any]] | None, num_tokens: int) -> IntArray:
    """Return the version of each token [num_tokens]. The server sends spans `{version, start, end}` (end excluded).

    Raises:
        AsyncRLError: the spans do not cover the tokens in order.
    """
    versions = np.empty(num_tokens, dtype=np.int32)
    covered = 0
    for span in spans or ():
        if span["start"] != covered or not str(span["version"]).isdecimal():
            break
        covered = span["end"]
        versions[span["start"] : covered] = int(span["version"])
    if covered != num_tokens:
        raise AsyncRLError(
            f"the rollout server's weight_versions must cover {num_tokens} tokens with whole-number versions, got "
            f"{spans}. Servers of the versions that constraints/ pins report them, older ones do not."
        )
    return versions
