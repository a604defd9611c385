"""The SGLang engine starts a server process and sends it two HTTP requests for each rollout group.

The first request, the primer, computes the prompt's KV once; the second samples all answers and finds that KV in the
prefix cache. Each group has its own prefix-cache key, so that no request reads the KV of an earlier group, which may
come from older weights: an update in place keeps the cache. SGLang's samples depend on how it batches, so its runs
don't repeat exactly unless `rollout.server_args` has enable-deterministic-inference (GPUs only).

With `weight_sync.on_update: abort` a push ends all requests. Their answers so far are kept, and the rest is requested
again, from prompt and answer so far, under a new cache key, so that all of its KV comes from the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.cores import threads_per_process
from async_rl.errors import AsyncRLError, ProcessDiedError, WeightSyncError
from async_rl.network import authorization
from async_rl.storage.model_folder import end_tokens
from async_rl.types import IntArray
from rollout_server.engines.base import Completion, GenerationRequest, Load, check_prompt
from rollout_server.engines.sglang.admin import SGLangAdmin
from rollout_server.engines.sglang.sglang_process import ServerProcess, server_flags

LOAD_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Answer:
    """One answer while it grows. It needs more than one request only if a push aborts the first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`; empty until the answer has ended."""
    seed: int = 0
    """The sampling seed. Only servers with deterministic inference use it."""

    def completion(self) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int32), logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32), finish_reason=self.finish_reason,
        )


class SGLangEngine:
    """The `Engine` that starts an SGLang server, or uses the running one at rollout.server_url."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        self.url = ""
        self.vocab_size = 0
        self._config = config
        self._name = f"SGLang server rollout/{index}"
        self._log_file = log_dir / f"sglang-rollout-{index}.log"
        self._server: ServerProcess | None = None
        """The server process; None if the run uses the server at rollout.server_url."""
        self._resubmits = config.weight_sync.on_update == "abort"
        self._attempts = itertools.count()
        self._cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        """Start the server, or attach to the one at rollout.server_url; return when it serves version 0."""
        model, self._end_tokens, on_gpu = await asyncio.to_thread(_inspect, self._config.model.path)
        self.vocab_size = int(model.vocab_size)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
            headers=authorization(self._config.network),
        )
        self._aborting = asyncio.create_task(self._abort_cancelled())
        if url := self._config.rollout.server_url:
            await asyncio.to_thread(attach_server, SGLangAdmin(self._config, url), self._config)
            self.url = url
            return
        free_bytes = psutil.virtual_memory().available
        flags = server_flags(self._config, model, on_gpu=on_gpu, free_memory_bytes=free_bytes)
        self._server = ServerProcess(
            self._name, flags, threads_per_process(self._config), self._log_file, self._config
        )
        await self._server.start()
        self.url = self._server.url

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Wait for the server to sample `request.n` answers, and return them. If cancelled, end its requests too.

        Raises:
            ProcessDiedError: the server broke the connection.
            AsyncRLError: the server refused the request, ended an answer early, or sent an incomplete reply.
        """
        check_prompt(request.prompt, self.vocab_size)
        answers = [Answer(seed=sampling_seed(request, sample)) for sample in range(request.n)]
        while open_answers := [answer for answer in answers if not answer.finish_reason]:
            await self._generate(request, open_answers)
        return [answer.completion() for answer in answers]

    async def _generate(self, request: GenerationRequest, answers: list[Answer]) -> None:
        """Request the rest of `answers` and append it to them. Each then has ended, or a push has aborted it."""
        # SGLang aborts every request whose id begins with the given text, so no id may begin with another id.
        key = f"{request.group_id}.{next(self._attempts)}."
        bodies = [request_body(request, answers, self._end_tokens, key)]
        if len(answers) > 1:
            bodies.insert(0, primer_body(request, key))
        for body in bodies:
            replies = await self._post(body, request.group_id)
        for answer, reply in zip(answers, replies, strict=True):
            extend_answer(answer, reply, request.max_tokens, self._end_tokens, may_abort=self._resubmits)

    async def _post(self, body: dict[str, Any], group_id: int) -> list[dict[str, Any]]:
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as reply:
                if reply.status != 200:
                    raise AsyncRLError(
                        f"{self._name} refused group {group_id} (HTTP {reply.status}): {(await reply.text())[:500]}"
                    )
                replies: list[dict[str, Any]] = await reply.json()
                return replies
        except asyncio.CancelledError:
            for rid in body["rid"]:
                self._cancelled.put_nowait(rid)
            raise
        except aiohttp.ClientError as error:
            await asyncio.sleep(0.5)  # a dying server closes its connections before its process has ended
            if self._server is not None:
                self._server.check_alive()
            raise ProcessDiedError(f"{self._name} at {self.url} broke the connection: {error!r}") from error

    async def _abort_cancelled(self) -> None:
        """Tell the server to end each request whose caller was cancelled; runs for as long as the engine."""
        while True:
            rid = await self._cancelled.get()
            timeout = aiohttp.ClientTimeout(total=self._config.timeouts.wire_s)
            # A server that is gone has no request left to end, and its other callers raise their own errors.
            with suppress(TimeoutError, aiohttp.ClientError):
                async with self._session.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=timeout):
                    pass
            self._cancelled.task_done()

    async def load(self) -> Load | None:
        """Return the load that the server reports, or None if it does not answer within LOAD_TIMEOUT_S."""
        rollout = self._config.rollout
        try:
            timeout = aiohttp.ClientTimeout(total=LOAD_TIMEOUT_S)
            async with self._session.get(f"{self.url}/v1/loads?include=core", timeout=timeout) as reply:
                if reply.status != 200:
                    return None
                ranks = (await reply.json())["loads"]
        except (TimeoutError, aiohttp.ClientError):
            return None
        running = sum(rank["num_running_reqs"] for rank in ranks)
        slots = sum(rank["max_running_requests"] for rank in ranks)
        slots = min(slots or running, rollout.concurrency * rollout.group_size)
        return Load(min(running, slots), slots)

    async def aclose(self) -> None:
        if hasattr(self, "_session"):
            self._aborting.cancel()
            await self._session.close()
        if self._server is not None:
            await self._server.aclose()


def attach_server(admin: SGLangAdmin, config: Config) -> None:
    """Reset a running server: end its requests, load the weights of model.path as version 0, and empty its cache.

    Raises:
        ConfigError: the server's settings would make it tag tokens with wrong versions.
        WeightSyncError: the server can't be reached, or refuses one of these requests.
    """
    try:
        is_disabled = admin.server_info().get("disable_overlap_schedule")
        check(
            is_disabled is True or config.weight_sync.on_update != "in_place", "rollout.server_url", admin.url,
            "a server with --disable-overlap-schedule for weight_sync.on_update in_place",
            "Else it tags tokens with versions that did not sample them. Or set weight_sync.on_update: retract.",
        )
        admin.resume()  # an earlier run may have left the server paused in the middle of a push
        admin.abort_all()
        admin.pause("in_place")
        admin.begin_update()
        admin.load_folder(Path(config.model.path).resolve(), version=0)
        admin.end_update()
        admin.resume()
        admin.flush_when_idle()
        version = admin.served_version()
    except WeightSyncError as error:
        raise WeightSyncError(
            f"rollout.server_url {admin.url} can't be used: {error}. Is an SGLang server running there?"
        ) from error
    if version != "0":
        raise WeightSyncError(
            f"the server at {admin.url} must serve weight version 0 after its reset, got {version!r}"
        )


def sampling_seed(request: GenerationRequest, sample: int) -> int:
    """Return the seed of one answer, in 0..2**31 - 1, which differs between the answers of a group."""
    source = np.random.SeedSequence((request.seed, request.prompt.index, sample))
    return int(source.generate_state(1)[0]) >> 1


def primer_body(request: GenerationRequest, key: str) -> dict[str, Any]:
    """Return the body of a /generate request that computes the prompt's KV and samples nothing."""
    return {
        "rid": [f"{key}prompt."], "input_ids": [request.prompt.tokens.tolist()],
        "sampling_params": [{"max_new_tokens": 0}], "extra_key": key,
    }


def request_body(
    request: GenerationRequest, answers: list[Answer], end_tokens: list[int], key: str
) -> dict[str, Any]:
    """Return the body of a /generate request that samples the missing rest of each answer."""
    prompt = request.prompt.tokens.tolist()
    sampling = {  # every parameter that could exclude tokens, even if it has SGLang's default
        "stop_token_ids": end_tokens, "temperature": request.temperature, "top_p": request.top_p, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }
    return {
        "rid": [f"{key}{i}." for i in range(len(answers))],
        "input_ids": [prompt + answer.tokens for answer in answers],
        "sampling_params": [
            {**sampling, "max_new_tokens": request.max_tokens - len(answer.tokens), "sampling_seed": answer.seed}
            for answer in answers
        ],
        "return_logprob": True,
        "extra_key": key,
    }


def extend_answer(
    answer: Answer, reply: dict[str, Any], max_tokens: int, end_tokens: list[int], *, may_abort: bool
) -> None:
    """Append the tokens of the server's reply to `answer`, and set its finish_reason if it has ended.

    Raises:
        AsyncRLError: the reply is incomplete, or ended by anything but stop, length or, with `may_abort`, an abort.
    """
    tokens, meta = reply["output_ids"], reply["meta_info"]
    finish = meta["finish_reason"]
    aborted = finish["type"] == "abort" and not finish.get("status_code")
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    if not (tokens or aborted) or len(logprobs) != len(tokens) or None in logprobs:
        raise AsyncRLError(
            f"SGLang must send one logprob for each token, got {len(tokens)} tokens and logprobs {logprobs[:20]}"
        )
    answer.tokens += tokens
    answer.logprobs += logprobs
    answer.versions += token_versions(meta.get("weight_versions"), len(tokens)).tolist()
    ended_by_token = finish["type"] == "stop" and isinstance(finish.get("matched"), int)
    if ended_by_token or (aborted and tokens and tokens[-1] in end_tokens):  # an abort can come with the last token
        answer.finish_reason = "stop"
    elif finish["type"] == "length" or (aborted and len(answer.tokens) == max_tokens):
        answer.finish_reason = "length"
    elif not (aborted and may_abort):
        raise AsyncRLError(f"SGLang did not finish an answer: finish_reason {finish}")


def token_versions(spans: list[dict[str, Any]] | None, num_tokens: int) -> IntArray:
    """Return the version of each token, [num_tokens], from SGLang's spans `{version, start, end}` (end excluded).

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
            f"SGLang's weight_versions must cover {num_tokens} tokens with whole-number versions, "
            f"got {spans}. SGLang 0.5.20 or newer reports them."
        )
    return versions


def _inspect(path: str) -> tuple[Any, list[int], bool]:
    """Return the text part of the config of the model at `path`, its end tokens, and whether this host has a GPU."""
    import torch
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config(), end_tokens(path), torch.cuda.is_available()
