"""The SGLang engine: its own server process, one HTTP request per rollout group, a version for every token.

A group is one request with `n` samples: SGLang computes the prompt once and the samples find it in the prefix
cache. Each group has a prefix-cache key of its own, so that no request reads the KV cache of a request before
it, which may come from older weights: an update in place keeps the cache. `seed` is not used: what SGLang
samples depends on how it batches, so its runs don't repeat exactly (the hf engine's do).
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ProcessDiedError, WaitTimeoutError
from async_rl.network import authorization
from async_rl.types import IntArray
from rollout_server.engine import Completion, GenerationRequest, Load
from rollout_server.server import ServerProcess, free_memory_bytes, server_flags, threads_per_process
from rollout_server.takeover import take_over

LOAD_TIMEOUT_S = 2.0


class SGLangEngine:
    """Implements `Engine`."""

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        self.url = ""
        self.vocab_size = 0
        self._config = config
        self._name = f"SGLang server rollout/{index}"
        self._log_file = log_dir / f"sglang-rollout-{index}.log"
        self._cache_keys = itertools.count()
        self._server: ServerProcess | None = None
        """None where a running server was taken over."""

    async def start(self) -> None:
        """Raises ConfigError, ProcessDiedError (with the log's last lines) or WaitTimeoutError."""
        model, self._eos_tokens, on_gpu = await asyncio.to_thread(_inspect, self._config.model.path)
        self.vocab_size = int(model.vocab_size)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
            headers=authorization(self._config.network),
        )
        if url := self._config.rollout.server_url:
            await take_over(self._session, url, self._config)
            self.url = url
            return
        flags = server_flags(self._config, model, on_gpu=on_gpu, free_memory_bytes=free_memory_bytes())
        self._server = ServerProcess(
            self._name, flags, threads_per_process(self._config), self._log_file, self._config
        )
        await self._server.start()
        self.url = self._server.url

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Raises ValueError on a prompt the model can't take, ProcessDiedError, WaitTimeoutError after
        `timeouts.generate_s`, and AsyncRLError when the server refuses, aborts or garbles the answer."""
        check_tokens(request.prompt.tokens, self.vocab_size, request.prompt.index)
        body = request_body(request, self._eos_tokens, f"group-{next(self._cache_keys)}")
        timeout_s = self._config.timeouts.generate_s
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(f"{self.url}/generate", json=body) as reply,
            ):
                if reply.status != 200:
                    raise AsyncRLError(
                        f"{self._name} refused group {request.group_id} (HTTP {reply.status}): "
                        f"{(await reply.text())[:500]}"
                    )
                answers = await reply.json()
        except TimeoutError:
            raise WaitTimeoutError(
                f"group {request.group_id} waited {timeout_s:.0f} s (timeouts.generate_s) for {self._name}"
            ) from None
        except aiohttp.ClientError as error:
            await asyncio.sleep(0.5)  # a dying server closes its connections before it can be seen dead
            if self._server is not None:
                self._server.check_alive()
            raise ProcessDiedError(f"{self._name} at {self.url} broke the connection: {error!r}") from error
        return [parse_completion(answer) for answer in (answers if isinstance(answers, list) else [answers])]

    async def load(self) -> Load | None:
        """From the server's /v1/loads, which reads shared memory and leaves its scheduler alone."""
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
            await self._session.close()
        if self._server is not None:
            await self._server.aclose()


def open_engine(config: Config, index: int, log_dir: Path) -> SGLangEngine:
    return SGLangEngine(config, index, log_dir)


def check_tokens(tokens: IntArray, vocab_size: int, prompt_index: int) -> None:
    """A token the model doesn't have would end the whole server, so it is refused here (ValueError)."""
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"prompt {prompt_index} must be one or more tokens in 0..{vocab_size - 1}, "
            f"got {tokens.tolist()[:20]}"
        )


def request_body(request: GenerationRequest, eos_tokens: list[int], cache_key: str) -> dict[str, Any]:
    """The JSON of a /generate request. Every parameter that could narrow the support is set, also to its
    default.
    """
    return {
        "input_ids": request.prompt.tokens.tolist(),
        "sampling_params": {
            "n": request.n, "max_new_tokens": request.max_tokens, "stop_token_ids": eos_tokens,
            "temperature": request.temperature, "top_p": request.top_p, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        },
        "return_logprob": True,
        "extra_key": cache_key,
    }


def parse_completion(answer: dict[str, Any]) -> Completion:
    """One sample of SGLang's reply. Raises AsyncRLError if it was aborted or isn't whole."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    finish = meta["finish_reason"]
    ended_by_token = finish["type"] == "stop" and isinstance(finish.get("matched"), int)
    if not (ended_by_token or finish["type"] == "length"):
        raise AsyncRLError(f"SGLang did not finish an answer: finish_reason {finish}")
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if not tokens or len(logprobs) != len(tokens) or None in logprobs:
        raise AsyncRLError(
            f"SGLang must send one logprob for each token, got {len(tokens)} tokens with {logprobs[:20]}"
        )
    return Completion(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=token_versions(meta.get("weight_versions"), len(tokens)),
        finish_reason=finish["type"],
    )


def token_versions(spans: list[dict[str, Any]] | None, num_tokens: int) -> IntArray:
    """[num_tokens] from SGLang's spans `{version, start, end}`, which must cover the tokens in order."""
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
    """The text part of the model's config, the tokens that end an answer, whether there is a GPU to serve
    from.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    sources = [config, AutoTokenizer.from_pretrained(path)]
    if (Path(path) / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(path))
    eos: set[int] = set()
    for source in sources:  # chat models name several, in different places
        named = getattr(source, "eos_token_id", None)
        eos.update(named if isinstance(named, list) else [] if named is None else [named])
    return config.get_text_config(), sorted(eos), torch.cuda.is_available()
