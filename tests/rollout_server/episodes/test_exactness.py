"""Many turns through real engines: the behaviour logprobs of a row are those of the versions that its tokens name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Sampling
from async_rl.base.types import Prompt
from learner.models.tiny_model import TINY_MODELS
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.env import Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.episodes.multi_turn import GroupSampler
from tests.kit.configs import server_config
from tests.kit.engines.replies import of_tokens, with_engine, wrong_sets
from tests.kit.tokenizers import end_tokens, tokenizer_of

pytestmark = pytest.mark.processes  # together they compute for long

TOLERANCE = 1e-4
LIMITS = SessionLimits(max_tokens=400, max_reply_tokens=12, max_turns=20)
NUM_TURNS = 4


class Chat:
    """Says something random to each reply, and stops after NUM_TURNS."""

    tools = ()

    def __init__(self, seed: int, turn_ended: Callable[[], Awaitable[None]]) -> None:
        self._rng = random.Random(seed)
        self._turn_ended = turn_ended
        self._num_turns = 0

    async def start(self) -> list[Message]:
        return [user("Talk.")]

    async def step(self, reply: Message) -> Step:
        await self._turn_ended()
        self._num_turns += 1
        text = "".join(self._rng.choices(["fox", " 42", "\n\n", "1.", reply["content"]], k=3))
        role = self._rng.choice(["user", "tool"])
        return Step(messages=[Message(role=role, content=text)], done=self._num_turns == NUM_TURNS)

    async def close(self) -> None:
        pass


def save_models(folder: Path, family: str) -> list[PreTrainedModel]:
    """Two versions of a tiny model, whose folders also hold the family's tokenizer."""
    name = "tiny-llama" if family.startswith("llama") else "tiny-qwen2"
    kind = TINY_MODELS[name]
    tokenizer, models = tokenizer_of(family), []
    for version in range(2):
        torch.manual_seed(version)
        model = kind.model(kind.config(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=end_tokens(family), pad_token_id=0,
        ))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.ndim == 2 else 1)
        model.save_pretrained(folder / str(version))
        tokenizer.save_pretrained(folder / str(version))
        models.append(AutoModelForCausalLM.from_pretrained(folder / str(version), dtype=torch.float32).eval())
    return models


def group_request(n: int, tokens: tuple[int, ...] = (1,), **narrowing: Any) -> GenerationRequest:
    prompt = Prompt(index=3, tokens=np.array(tokens, np.int32), text="", question=None)
    return GenerationRequest(
        group_id=5, prompt=prompt, start_version=0, seed=7, n=n, max_tokens=LIMITS.max_reply_tokens, temperature=0.9,
        **narrowing,
    )


async def play_group(
    engine: Engine, family: str, n: int, turn_ended: Callable[[], Awaitable[None]], **narrowing: Any
) -> list[Episode]:
    tokenizer, ends = tokenizer_of(family), end_tokens(family)
    renderer, reader = TurnRenderer(tokenizer, ends), ReplyReader(tokenizer, ends, None)
    sampler = GroupSampler(engine.generate, group_request(n, **narrowing))
    runner = EnvRunner(EpisodeLimits(tool_s=30, turn_s=30, episode_s=120), 64)

    async def play(sample: int) -> Episode:
        generate = sampler.of_sample(sample)
        return await runner.run(
            lambda: Chat(sample, turn_ended), lambda: Session(generate, renderer, reader, LIMITS)
        )  # fmt: skip

    return list(await asyncio.gather(*map(play, range(n))))


def check(episodes: list[Episode], models: list[PreTrainedModel], sampling: Sampling) -> set[int]:
    """Assert that all behaviour logprobs, and the supports if tokens were left out, can be recomputed; return the
    versions that sampled tokens.
    """
    seen = set()
    for episode in episodes:
        assert episode.end == "done" and episode.metrics["turns"] == NUM_TURNS, episode.error
        (row,) = episode.rows
        ids = torch.from_numpy(row.tokens).long()[None]
        with torch.no_grad():
            fresh = [(model(ids).logits[0].float() / 0.9).log_softmax(-1) for model in models]
        for position in np.flatnonzero(row.mask).tolist():
            version = int(row.versions[position])
            seen.add(version)
            whole, token = fresh[version][position - 1 : position], row.tokens[position : position + 1]
            own = row.support and row.support.cut(position, position + 1)
            assert abs(row.logprobs[position] - of_tokens(whole, token, own).item()) < TOLERANCE
            assert own is None or wrong_sets(whole, own, sampling) == []
        assert (row.support is not None) == sampling.narrows
        if row.support is not None:
            assert ((row.support.sizes > 0) == row.mask).all()
    return seen


@pytest.mark.parametrize(("family", "narrowing"), [
    ("qwen3", {}), ("llama3_2", {}), ("qwen3", {"top_p": 0.9, "wants_support": True}),
])
def test_logprobs_of_all_turns_are_those_of_the_hf_engine_version(
    family: str, narrowing: dict[str, Any], tmp_path: Path
) -> None:
    models = save_models(tmp_path, family)
    state = {name: tensor.clone() for name, tensor in models[1].state_dict().items()}

    async def play(engine: HFEngine) -> list[Episode]:
        num_ended = 0

        async def turn_ended() -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended == 10:  # some episodes are in their second turn, some in their third
                await engine.pause(keep_kv=False)
                await engine.load_weights(state, 1)
                engine.resume()

        return await play_group(engine, family, 6, turn_ended, **narrowing)

    episodes = with_engine(server_config("hf", tmp_path / "0"), play)
    assert check(episodes, models, group_request(1, **narrowing).sampling) == {0, 1}


def test_replies_of_other_episodes_and_turns_have_other_random_numbers() -> None:
    seeds = []

    class Recorder:
        async def generate(self, request: GenerationRequest) -> list[Any]:
            seeds.append((request.seed, request.n))
            return [request.seed] * request.n

    async def ask() -> None:
        sampler = GroupSampler(Recorder().generate, group_request(2))  # type: ignore[arg-type]
        both = [sampler.of_sample(sample) for sample in range(2)]
        await asyncio.gather(*(generate([1, 2], 5) for generate in both))  # the first turn of the whole group
        await asyncio.gather(*(generate([1, 2], 5) for generate in both))
        await both[0]([1, 2], 5)
        await asyncio.gather(both[0]([1, 2], 5), both[1]([1, 2], 6))

    asyncio.run(ask())
    assert seeds[0] == (7, 2) and [n for _, n in seeds] == [2, 2, 1, 1, 1]
    assert len({seed for seed, _ in seeds}) == 5


def test_a_request_that_nobody_waits_for_is_cancelled_at_the_engine() -> None:
    cancelled = []

    class Slow:
        async def generate(self, request: GenerationRequest) -> list[Any]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request.n)
                raise
            raise AssertionError

    async def ask() -> None:
        sampler = GroupSampler(Slow().generate, group_request(2))  # type: ignore[arg-type]
        tasks = [asyncio.create_task(sampler.of_sample(sample)([1], 5)) for sample in range(2)]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        await asyncio.sleep(0.02)
        assert cancelled == []  # the other one still waits
        tasks[1].cancel()
        await asyncio.sleep(0.02)
        assert cancelled == [2]

    asyncio.run(ask())
