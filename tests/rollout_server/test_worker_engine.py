"""A worker whose engine dies, never answers, or runs into a timeout of its own."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.configs import worker_config
from tests.kit.engines.fakes import EchoEngine
from tests.kit.worker import rolled_out


def test_an_engine_that_dies_ends_the_run_with_its_error() -> None:
    class DyingEngine(EchoEngine):
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            raise ProcessDiedError("rollout/0: the server ended with code -9")

    config = worker_config(timeouts={"batch_s": 1})
    with pytest.raises(ProcessDiedError, match="code -9"):
        rolled_out(config, DyingEngine(), lambda question, text: 1.0)


def test_an_engine_that_never_answers_is_named_with_the_time_waited() -> None:
    class SilentEngine(EchoEngine):
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            await asyncio.sleep(60)
            return []

    config = worker_config(timeouts={"generate_s": 0.2, "batch_s": 1})
    with pytest.raises(WaitTimeoutError, match=r"^rollout/0 .*training-"):
        rolled_out(config, SilentEngine(), lambda question, text: 1.0)


def test_a_timeout_of_the_engines_own_is_not_blamed_on_generate_s() -> None:
    class ImpatientEngine(EchoEngine):
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            raise TimeoutError("the engine waited for a connection")

    config = worker_config(timeouts={"batch_s": 1})
    with pytest.raises(TimeoutError, match="the engine waited for a connection"):
        rolled_out(config, ImpatientEngine(), lambda question, text: 1.0)
