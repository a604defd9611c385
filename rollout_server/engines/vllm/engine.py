"""The vLLM engine starts a server in vLLM's own environment and sends it one HTTP request for each rollout group.

vLLM computes the KV of the prompt once for all answers of a request, as far as it fills whole blocks of its cache. Each
request has a prefix-cache key (salt) of its own, so that none reads KV that may come from older weights. vLLM's samples
depend on how it batches, so its runs don't repeat exactly (the hf engine's do).

With `weight_sync.on_update: abort` a push ends all requests. Their answers so far are kept, and the rest is requested
again, from prompt and answer so far, under a new key, so that all of its KV comes from the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ProcessDiedError
from async_rl.network import authorization
from async_rl.storage.model_folder import end_tokens
from rollout_server.engines.base import Completion, GenerationRequest, Load, check_prompt
from rollout_server.engines.server_process import ServerProcess
from rollout_server.engines.vllm.admin import GENERATE, VLLMAdmin
from rollout_server.engines.vllm.flags import server_flags
from rollout_server.engines.vllm.requests import Answer, extend_answer, group_answers, request_body
from rollout_server.engines.vllm.vllm_process import vllm_process

LOAD_TIMEOUT_S = 2.0
_RUNNING = "vllm:num_requests_running"


class VLLMEngine:
    """The `Engine` that starts a vLLM server."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        self.url = ""
        self.vocab_size = 0
        self._config = config
        self._name = f"vLLM server rollout/{index}"
        self._log_file = log_dir / f"vllm-rollout-{index}.log"
        self._server: ServerProcess | None = None
        self._resubmits = config.weight_sync.on_update == "abort"
        self._attempts = itertools.count()
        self._newest = 0
        """The newest start version of a request so far."""
        self._cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        """Start the server; return when it serves version 0.

        Raises:
            ConfigError: the server can't be used with this configuration, or there is no environment with vLLM.
            ProcessDiedError: the server ended. The message has the last lines of its log.
            WaitTimeoutError: the server did not answer in time.
        """
        model, self._end_tokens, on_gpu = await asyncio.to_thread(_inspect, self._config.model.path)
        self.vocab_size = int(model.vocab_size)
        free_bytes = psutil.virtual_memory().available
        flags = server_flags(self._config, model, on_gpu=on_gpu, free_memory_bytes=free_bytes)
        self._slots = int(flags["max-num-seqs"])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
            headers=authorization(self._config.network),
        )
        self._aborting = asyncio.create_task(self._abort_cancelled())
        self._server = vllm_process(self._name, flags, self._log_file, self._config, on_gpu=on_gpu)
        await self._server.start()
        self.url = self._server.url
        await asyncio.to_thread(VLLMAdmin(self._config, self.url).set_version, 0)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Wait for the server to sample `request.n` answers, and return them. If cancelled, end its requests too.

        Raises:
            ValueError: the prompt has no tokens, or a token outside the vocabulary.
            ProcessDiedError: the server broke the connection.
            AsyncRLError: the server refused the request, ended an answer early, or sent an incomplete reply.
        """
        check_prompt(request.prompt, self.vocab_size)
        answers = [Answer() for _ in range(request.n)]
        while open_answers := [answer for answer in answers if not answer.finish_reason]:
            await asyncio.gather(*(self._extend(request, each) for each in group_answers(open_answers)))
        return [answer.completion() for answer in answers]

    async def _extend(self, request: GenerationRequest, answers: list[Answer]) -> None:
        """Extend `answers` in place, each to its end or until a push aborts it."""
        self._newest = max(self._newest, request.start_version)
        # The groups with the nearest deadline go first. An evaluation, which has none, queues like the newest group.
        priority = self._newest if request.group_id < 0 else request.start_version
        key = f"{request.group_id}.{next(self._attempts)}"
        body = request_body(request, answers, self._end_tokens, key, priority)
        choices = await self._post(body, request.group_id)
        for answer, choice in zip(answers, choices, strict=True):
            extend_answer(answer, choice, request.max_tokens, self._end_tokens)
            if not (answer.finish_reason or self._resubmits):
                raise AsyncRLError(f"vLLM did not finish an answer: finish_reason {choice['finish_reason']}")

    async def _post(self, body: dict[str, Any], group_id: int) -> list[dict[str, Any]]:
        try:
            async with self._session.post(self.url + GENERATE, json=body) as reply:
                if reply.status != 200:
                    raise AsyncRLError(
                        f"{self._name} refused group {group_id} (HTTP {reply.status}): {(await reply.text())[:500]}"
                    )
                choices: list[dict[str, Any]] = (await reply.json())["choices"]
                return choices
        except asyncio.CancelledError:
            self._cancelled.put_nowait(body["request_id"])
            raise
        except aiohttp.ClientError as error:
            await asyncio.sleep(0.5)  # a dying server closes its connections before its process has ended
            if self._server is not None:
                self._server.check_alive()
            raise ProcessDiedError(f"{self._name} at {self.url} broke the connection: {error!r}") from error

    async def _abort_cancelled(self) -> None:
        """End the requests of cancelled callers on the server. Runs until it is cancelled itself."""
        while True:
            body = {"request_ids": [await self._cancelled.get()]}
            timeout = aiohttp.ClientTimeout(total=self._config.timeouts.wire_s)
            # A server that is gone has no request left to end, and its other callers raise their own errors.
            with suppress(TimeoutError, aiohttp.ClientError):
                async with self._session.post(f"{self.url}/abort_requests", json=body, timeout=timeout):
                    pass
            self._cancelled.task_done()

    async def load(self) -> Load | None:
        """Return the load from the server's /metrics, or None if it does not answer within LOAD_TIMEOUT_S."""
        try:
            timeout = aiohttp.ClientTimeout(total=LOAD_TIMEOUT_S)
            async with self._session.get(f"{self.url}/metrics", timeout=timeout) as reply:
                if reply.status != 200:
                    return None
                lines = (await reply.text()).splitlines()
        except (TimeoutError, aiohttp.ClientError):
            return None
        running = sum(int(float(line.split()[-1])) for line in lines if line.startswith(_RUNNING))
        rollout = self._config.rollout
        slots = min(self._slots, rollout.concurrency * rollout.group_size)
        return Load(min(running, slots), slots)

    async def aclose(self) -> None:
        if hasattr(self, "_session"):
            self._aborting.cancel()
            await self._session.close()
        if self._server is not None:
            await self._server.aclose()


def _inspect(path: str) -> tuple[Any, list[int], bool]:
    """Return the text part of the model's config, the tokens that end an answer, and whether there is a GPU."""
    import torch
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config(), end_tokens(path), torch.cuda.is_available()
