"""A tiny model learns `chain` over sessions with the hf engine: warm start from an oracle, then policy gradient."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from async_rl.base.types import Prompt
from learner.models.tiny_model import character_tokenizer, tiny_model
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.rows import WholeRow
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.environments import chain
from rollout_server.episodes.episode import Episode, EpisodeLimits
from rollout_server.episodes.players.demonstrations import OracleSession
from rollout_server.episodes.players.engine_sampler import GroupSampler
from rollout_server.episodes.players.env_runner import EnvRunner
from tests.kit.configs import server_config

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
RENDERER = TurnRenderer(TOKENIZER, [END])
READER = ReplyReader(TOKENIZER, [END], None)
LIMITS = SessionLimits(max_tokens=500, max_reply_tokens=8, max_turns=40)
HELD_OUT = 10**6


def new_runner() -> EnvRunner:
    return EnvRunner(EpisodeLimits(tool_s=10, turn_s=10, episode_s=120), max_concurrent_calls=1024)


async def demonstrations(count: int) -> list[WholeRow]:
    runner = new_runner()
    episodes = await asyncio.gather(*(
        runner.run(
            partial(chain.Chain, -1 - index, mean_s=0),
            partial(OracleSession, chain.oracle, random.Random(index), TOKENIZER, RENDERER, READER, LIMITS, ""),
        )
        for index in range(count)
    ))  # fmt: skip
    return [row for episode in episodes for row in episode.rows]


async def play(engine: HFEngine, index: int, n: int, seed: int) -> list[Episode]:
    """One group."""
    runner = new_runner()
    prompt = Prompt(index=index, tokens=np.array([1], np.int32), text="", question=None)
    request = GenerationRequest(
        group_id=index, prompt=prompt, start_version=0, seed=seed, n=n, max_tokens=8, temperature=1.0
    )
    sampler = GroupSampler(engine.generate, request)

    async def one(sample: int) -> Episode:
        generate = sampler.of_sample(sample)
        return await runner.run(
            lambda: chain.Chain(index, sample, mean_s=0), lambda: Session(generate, RENDERER, READER, LIMITS)
        )

    return list(await asyncio.gather(*map(one, range(n))))


async def mean_reward(engine: HFEngine) -> float:
    groups = await asyncio.gather(*(play(engine, HELD_OUT + index, 1, 1) for index in range(512)))
    return statistics.mean(group[0].reward for group in groups)


def loss_of(model: PreTrainedModel, rows: list[WholeRow], weights: list[float]) -> torch.Tensor:
    """Minus the mean over trained tokens of weight * logprob."""
    tokens = pad_sequence([torch.from_numpy(row.tokens).long() for row in rows], batch_first=True)
    trained = pad_sequence([torch.from_numpy(row.mask) for row in rows], batch_first=True)[:, 1:]
    logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -(logprobs * trained * torch.tensor(weights)[:, None]).sum() / trained.sum()


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[WholeRow], weights: list[float]) -> None:
    optimizer.zero_grad()
    loss_of(model, rows, weights).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_tiny_model_learns_to_follow_chains(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, rng = tiny_model("tiny-qwen2", 0), random.Random(0)

    async def train() -> tuple[float, float]:
        shown = await demonstrations(4000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(250):
            rows = rng.sample(shown, 64)
            step(model, optimizer, rows, [1.0] * len(rows))
        model.save_pretrained(tmp_path)
        TOKENIZER.save_pretrained(tmp_path)
        config = server_config("hf", tmp_path)
        engine = HFEngine(dataclasses.replace(config), 0)
        await engine.start()
        try:
            before = await mean_reward(engine)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
            for version in range(30):
                groups = await asyncio.gather(*(play(engine, version * 32 + i, 8, 0) for i in range(32)))
                rewards = torch.tensor([[episode.reward for episode in group] for group in groups])
                advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.1)
                pairs = [
                    (row, float(advantages[g, i]))
                    for g, group in enumerate(groups) for i, episode in enumerate(group) for row in episode.rows
                ]  # fmt: skip
                await asyncio.to_thread(step, model, optimizer, [row for row, _ in pairs], [w for _, w in pairs])
                state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
                await engine.load_weights(state, version + 1)
            return before, await mean_reward(engine)
        finally:
            await engine.aclose()

    before, after = asyncio.run(train())
    print(f"reward before {before:.2f}, after {after:.2f}")
    assert 0.4 < before < 0.75 and after > before + 0.15


def test_an_oracle_shows_whole_episodes_through_a_real_session() -> None:
    rows = asyncio.run(demonstrations(50))
    assert len(rows) == 50
    for row in rows:
        text = TOKENIZER.decode(row.tokens)
        first, *replies = text.split("<sep>")
        assert len(first) == 1 and all(reply[0] in "?=" and "<eos>" in reply for reply in replies)
        trained = TOKENIZER.decode(row.tokens[row.mask])
        assert trained == "".join(reply[: reply.index("<eos>") + 5] for reply in replies)
