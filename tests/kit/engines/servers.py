"""A running SGLang or vLLM server, and what it says of the requests that it gets.

The fixture `server` takes the name of an engine, and is a server that the tests of the folder share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import pytest

from async_rl.base.seams.engines import ENGINES
from rollout_server.engines.vllm.admin import GENERATE
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.vllm import vllm

on_both = pytest.mark.parametrize("server", ["sglang", vllm()], indirect=True)
on_all = pytest.mark.parametrize("server", ["hf", "sglang", vllm()], indirect=True)


class Server(EngineInThread, ABC):
    """An engine with its server, of which the tests know more than the engine does."""

    control_routes: ClassVar[tuple[str, ...]]
    """Some endpoints of POST requests by which a stranger could do harm."""
    open_routes: ClassVar[tuple[str, ...]]
    """How the paths of endpoints begin that answer everybody."""
    cache_block_tokens: ClassVar[int]
    """The prefix cache finds whole blocks of so many tokens."""

    @cached_property
    def admin(self) -> Any:
        return ENGINES[self.config.rollout.engine].load_admin()(self.config, self.engine.url)

    def let_replies_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have each later reply get all of its `max_tokens`: no token ends it."""
        monkeypatch.setattr(self.engine, "end_tokens", [])

    @abstractmethod
    def num_unfinished(self) -> int:
        """The replies that run or wait on the server."""

    @abstractmethod
    async def cached_tokens(self, response: Any) -> int:
        """A count of tokens whose KV was found in the prefix cache, which grows with each response."""

    def record_cached_tokens(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The list to which each later request for one reply appends the tokens whose KV was in the prefix cache."""
        cached: list[int] = []
        post = self.engine.post

        async def post_and_record(path: str, body: dict[str, Any], *rest: Any) -> Any:
            before = await self.cached_tokens(None)
            response = await post(path, body, *rest)
            cached.append(await self.cached_tokens(response) - before)
            return response

        monkeypatch.setattr(self.engine, "post", post_and_record)
        return cached


class SGLangServer(Server):
    """A server that names what it found in its cache in each response."""

    control_routes = ("/pause_generation", "/generate", "/update_weights_from_disk")
    open_routes = ("/health", "/ready", "/metrics")
    cache_block_tokens = 1

    def let_replies_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().let_replies_go_on(monkeypatch)
        post = self.engine.post

        async def post_without_ends(path: str, body: dict[str, Any], *rest: Any) -> Any:
            for sampling in body["sampling_params"]:
                sampling["ignore_eos"] = True  # else the end token of the model's folder counts too
            return await post(path, body, *rest)

        monkeypatch.setattr(self.engine, "post", post_without_ends)

    def num_unfinished(self) -> int:
        loads = self.admin.ask("GET", "/v1/loads")["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def cached_tokens(self, response: Any) -> int:
        # The response to an aborted request has no count.
        return response[0]["meta_info"].get("cached_tokens", 0) if response else 0


class VLLMServer(Server):
    """A server that counts its requests and what it found in its cache at /metrics."""

    control_routes = ("/pause", "/collective_rpc", "/update_weights", GENERATE)
    open_routes = ()
    cache_block_tokens = 32

    def num_unfinished(self) -> int:
        return self.run(self._metric("vllm:num_requests_running{", "vllm:num_requests_waiting{"))

    async def cached_tokens(self, response: Any) -> int:
        return await self._metric("vllm:prefix_cache_hits_total{")

    async def _metric(self, *names: str) -> int:
        lines = (await self.engine._get_text("/metrics") or "").splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(names)]
        assert len(values) == len(names), f"got {values} for {names}"
        return int(sum(values))
