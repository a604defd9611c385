from __future__ import annotations

import asyncio
import random

import pytest

from async_rl.base.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.conversation.session import SessionLimits
from rollout_server.episodes.env import MakeEnv, load_env
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from tests.kit.episodes.sessions import scripted, session_of

pytest.importorskip("textarena")

TOKENIZER = character_tokenizer()
LIMITS = EpisodeLimits(tool_s=5, turn_s=20, episode_s=60)
SIZES = SessionLimits(max_tokens=20_000, max_reply_tokens=20, max_turns=40)
NAME = "rollout_server.episodes.environments.textarena:TextArena"
GUESSES = [f"[{number}]" for number in range(1, 21)]


async def play(make: MakeEnv, index: int) -> Episode:
    return await EnvRunner(LIMITS, 8).run(
        lambda: make(None, index, 0),
        lambda: session_of(scripted(TOKENIZER, GUESSES), TOKENIZER, [TOKENIZER.eos_token_id], SIZES),
    )


def played(*indices: int, name: str = "GuessTheNumber-v0") -> list[Episode]:
    make = load_env(NAME, {"name": name}, False)

    async def all_of_them() -> list[Episode]:
        return await asyncio.gather(*(play(make, index) for index in indices))

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def test_a_game_is_played_to_its_end() -> None:
    for episode in played(0, 1, 2):
        assert episode.end == "done", episode.error
        (row,) = episode.rows
        text = TOKENIZER.decode(row.tokens)
        assert "[1]<eos>" in text and text.count("<eos>") == episode.metrics["turns"] > 1
        assert "env/invalid_move" in episode.metrics


def test_an_index_is_the_same_game_whatever_is_played_beside_it() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    alone = [played(index)[0] for index in (3, 4, -1)]
    together = played(3, 4, -1, 5, 6, 7)
    assert random.random() == expected  # the global random numbers are left as they were
    for one, other in zip(alone, together, strict=False):
        assert one.rows[0].tokens.tolist() == other.rows[0].tokens.tolist() and one.reward == other.reward
    assert len({tuple(episode.rows[0].tokens.tolist()) for episode in together}) > 1


def test_a_game_for_two_players_is_refused() -> None:
    with pytest.raises(ConfigError, match="'TicTacToe-v0'"):
        played(0, name="TicTacToe-v0")
