from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_rl.base.errors import AsyncRLError
from async_rl.base.types import Prompt
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.episode import question_rows
from rollout_server.episodes.player import SingleTurnPlayer
from tests.kit.engines.fakes import completion

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


def question(text: str, n: int) -> GenerationRequest:
    tokens = np.array(TOKENIZER(text).input_ids, np.int32)
    return GenerationRequest(
        group_id=7, prompt=Prompt(index=3, tokens=tokens, text=text, question=None), start_version=4, seed=1, n=n,
        max_tokens=2, temperature=1.0,
    )  # fmt: skip


def test_the_answers_to_a_question_are_one_request_and_trained_as_sampled() -> None:
    """Also an answer that ran into its limit, and one whose tokens other weights than the first's sampled."""
    three, cut = [*TOKENIZER("3").input_ids, END], TOKENIZER("27").input_ids
    updated = SampledReply(
        tokens=np.array(three, np.int32), logprobs=np.array([-0.1, -0.2], np.float32),
        versions=np.array([4, 5], np.int32), finish_reason="stop",
    )  # fmt: skip
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> list[SampledReply]:
        asked.append(request)
        return [updated, completion(cut, 4, ended=False)]

    request = question("1+2=", 2)
    episodes = asyncio.run(SingleTurnPlayer(TOKENIZER, generate).play(request))
    assert asked == [request]
    assert [episode.answer for episode in episodes] == ["3", "27"]
    rows = question_rows([episode.with_reward(1.5) for episode in episodes], request.prompt.tokens)
    first, second = rows.rows
    assert first.tokens.tolist() == three and second.tokens.tolist() == cut
    assert first.versions.tolist() == [4, 5] and second.versions.tolist() == [4, 4]
    np.testing.assert_array_equal(first.logprobs, updated.logprobs)
    assert first.mask.all() and second.mask.all()
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert first.reward == second.reward == 1.5


def test_an_engine_that_gives_fewer_answers_than_asked_is_refused() -> None:
    async def generate(request: GenerationRequest) -> list[SampledReply]:
        return [completion([END])]

    with pytest.raises(AsyncRLError, match="training-7"):
        asyncio.run(SingleTurnPlayer(TOKENIZER, generate).play(question("1+2=", 2)))
