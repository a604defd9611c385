from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_rl.base.errors import AsyncRLError
from async_rl.base.types import Prompt
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.episode import SingleTurnPlayer
from tests.kit.engines.fakes import completion

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


def question(text: str, n: int) -> GenerationRequest:
    tokens = np.array(TOKENIZER(text).input_ids, np.int32)
    return GenerationRequest(
        group_id=7, prompt=Prompt(index=3, tokens=tokens, text=text, question=None), start_version=4, seed=1, n=n,
        max_tokens=2, temperature=1.0,
    )  # fmt: skip


def test_an_engine_that_gives_fewer_answers_than_asked_is_refused() -> None:
    async def generate(request: GenerationRequest) -> list[SampledReply]:
        return [completion([END])]

    with pytest.raises(AsyncRLError, match="training-7"):
        asyncio.run(SingleTurnPlayer(TOKENIZER, generate).play(question("1+2=", 2)))
