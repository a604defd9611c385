"""The vLLM engine starts a server in vLLM's own environment and sends it one HTTP request for each group.

vLLM computes the KV of the prompt once for all replies of a request, as far as it fills whole blocks of its cache.
vLLM's samples depend on how it batches, so its runs don't repeat exactly (the hf engine's do).
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import psutil

from async_rl.base.config import Config
from rollout_server.engines.base import GenerationRequest, Load
from rollout_server.engines.http_engine import HttpEngine, cache_key
from rollout_server.engines.open_reply import OpenReply
from rollout_server.engines.vllm.admin import GENERATE, VLLMAdmin
from rollout_server.engines.vllm.flags import server_flags
from rollout_server.engines.vllm.vllm_process import vllm_process

_RUNNING = "vllm:num_requests_running"
_CACHE = re.compile(r'^vllm:cache_config_info\{(.*)\}', re.MULTILINE)


class VLLMEngine(HttpEngine):
    """The `Engine` of rollout.engine=vllm: starts one vLLM server and has it reply the requests of its worker."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        super().__init__(config, index, log_dir, "vLLM")

    async def open_server(self, model: Any, on_gpu: bool) -> None:
        free_bytes = psutil.virtual_memory().available
        flags = server_flags(
            self._config, model, on_gpu=on_gpu, free_memory_bytes=free_bytes, seed=self._seed
        )
        self._slots = int(flags["max-num-seqs"])
        self.server = vllm_process(self._name, flags, self._log_file, self._config, on_gpu=on_gpu)
        await self.server.start()
        self.url = self.server.url
        await asyncio.to_thread(VLLMAdmin(self._config, self.url).set_version, 0)

    async def _extend(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        await asyncio.gather(*(self._extend_equal(request, each) for each in group_replies(replies)))

    async def _extend_equal(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        """Extend `replies`, which have the same tokens so far, by the tokens that one request samples for them."""
        key = f"{request.key}.{next(self._attempts)}"
        body = request_body(request, replies, self.end_tokens, key, self.priority(request))
        response = await self.post(GENERATE, body, [key], request.key)
        for reply, choice in zip(replies, response["choices"], strict=True):
            extend_reply(reply, choice, request.max_tokens, self.end_tokens, may_abort=self.resubmits)

    def _abort_request(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}  # as this endpoint names them

    async def load(self) -> Load | None:
        """Return the server's running replies and their limit, or None if it does not answer within LOAD_TIMEOUT_S."""
        text = await self._get_text("/metrics")
        if text is None:
            return None
        running = sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(_RUNNING))
        rollout = self._config.rollout
        slots = min(self._slots, rollout.max_groups_in_flight * rollout.group_size)
        return Load(min(running, slots), slots, kv_tokens(text))


def kv_tokens(metrics: str) -> int:
    """Return from the text of vLLM's /metrics for how many tokens its KV cache has room; 0 if it does not say that."""
    found = _CACHE.search(metrics)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    sizes = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    return int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else 0


def group_replies(replies: list[OpenReply]) -> list[list[OpenReply]]:
    """Return `replies` in lists, one for each request: all without a token share one, each other has one of its own."""
    new = [reply for reply in replies if not reply.tokens]
    return ([new] if new else []) + [[reply] for reply in replies if reply.tokens]


def request_body(
    request: GenerationRequest, replies: list[OpenReply], end_tokens: list[int], key: str, priority: int
) -> dict[str, Any]:
    """Return the body of a request that samples the missing rest of `replies`, which have the same tokens so far.

    It sets every parameter that could exclude tokens from sampling, even if to vLLM's default.

    Args:
        key: the id of the request.
        priority: vLLM's scheduler prefers requests with lower ones.
    """
    sampled = replies[0].tokens
    return {
        "request_id": key, "token_ids": request.prompt.tokens.tolist() + sampled, "priority": priority,
        "cache_salt": cache_key(request),
        "sampling_params": {
            "n": len(replies), "max_tokens": request.max_tokens - len(sampled), "temperature": request.temperature,
            "top_p": request.top_p, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "logprobs": 0, "ignore_eos": True, "stop_token_ids": end_tokens,
            "detokenize": False,
        },
    }


def extend_reply(
    reply: OpenReply, choice: dict[str, Any], max_tokens: int, end_tokens: list[int], *, may_abort: bool
) -> None:
    """Append the tokens of one choice of a response to `reply`, and set its finish_reason if it has ended.

    AsyncRLError: see OpenReply.extend.
    """
    logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    reply.extend(
        choice["token_ids"] or [], logprobs, choice["weight_versions"], choice["finish_reason"],
        max_tokens=max_tokens, end_tokens=end_tokens, may_abort=may_abort,
    )
