from __future__ import annotations

import asyncio

import pytest

from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.env import load_env
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.question import Question
from tests.kit.episodes.sessions import scripted, session_of

pytest.importorskip("skyrl_gym")

TOKENIZER = character_tokenizer()
LIMITS = EpisodeLimits(tool_s=5, turn_s=20, episode_s=60)
QUESTION = Question(messages=({"role": "user", "content": "17+25?"},), ground_truth="42", source="openai/gsm8k")
NAME = "rollout_server.episodes.environments.skyrl_gym:SkyRLGym"


def played(params: dict[str, object], *replies: str) -> Episode:
    make = load_env(NAME, params, True)

    async def play() -> Episode:
        return await EnvRunner(LIMITS, 4).run(
            lambda: make(QUESTION, 0, 0),
            lambda: session_of(scripted(TOKENIZER, replies), TOKENIZER, [TOKENIZER.eos_token_id]),
        )

    return asyncio.run(asyncio.wait_for(play(), 60))


def test_a_question_of_one_turn_is_rewarded() -> None:
    episode = played({"name": "gsm8k"}, "#### 42")
    assert (episode.end, episode.reward, episode.metrics["turns"]) == ("done", 1.0, 1)
    assert TOKENIZER.decode(episode.rows[0].tokens) == "17+25?<sep>#### 42<eos>"


def test_an_episode_of_several_turns_is_played() -> None:
    episode = played({"name": "gsm8k_multi_turn", "extras": {"max_turns": 3}}, "I think 41.", "#### 42")
    assert (episode.end, episode.metrics["turns"]) == ("done", 2) and episode.reward > 0.9, episode.error
    text = TOKENIZER.decode(episode.rows[0].tokens)
    assert text.startswith("17+25?<sep>I think 41.<eos>\n") and text.endswith("<sep>#### 42<eos>")
