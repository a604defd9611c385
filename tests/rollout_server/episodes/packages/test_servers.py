"""OpenEnv and verifiers, whose servers run in environments of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.agents import AgentRunner
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.environments import verifiers_server
from rollout_server.episodes.environments.openenv import OpenEnv
from rollout_server.episodes.environments.verifiers_server import solve
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.question import Question
from tests.kit.episodes.sessions import scripted, session_of
from tests.kit.virtual_environments import new_environment, serving

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
TOKENIZER = character_tokenizer()
ENDS = [TOKENIZER.eos_token_id]
LIMITS = EpisodeLimits(tool_s=5, turn_s=30, episode_s=60)


@pytest.fixture(scope="module")
def openenv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an OpenEnv server with room for eight sessions."""
    folder = tmp_path_factory.mktemp("openenv")
    python = new_environment(folder / "venv", ("openenv-core==0.3.0",), sees_ours=False)
    with serving(lambda port: [python, HERE / "openenv_guess.py", str(port)], folder) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Question]]:
    """The tasks that a server of verifiers serves."""
    folder = tmp_path_factory.mktemp("verifiers")
    python = new_environment(folder / "venv", ("verifiers==0.4.0",), sees_ours=False)
    command = [python, verifiers_server.__file__, "verifiers_numbers", folder / "tasks.jsonl", "--count", "10"]
    with serving(lambda port: [*command, "--address", f"tcp://127.0.0.1:{port}"], HERE):
        rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
        yield [
            Question(messages=tuple(row["prompt"]), ground_truth="", extra=row["extra_info"], source=row["data_source"])
            for row in rows
        ]


def bisecting(tokens: list[int]) -> str:
    """The next guess after a conversation like `?<sep>15<eos>...h<sep>`."""
    low, high = 0, 30
    turns = TOKENIZER.decode(tokens).split("<sep>")
    for said in turns[1:-1]:
        guess, _, hint = said.partition("<eos>")
        low, high = (int(guess) + 1, high) if "higher" in hint else (low, int(guess) - 1)
    return str((low + high) // 2)


def saying(reply: Callable[[list[int]], str]) -> Any:
    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        return await scripted(TOKENIZER, [reply(tokens)])(tokens, max_tokens)

    return generate


def test_many_episodes_of_an_openenv_server_are_played_at_once(openenv: str) -> None:
    async def play(index: int) -> Episode:
        return await EnvRunner(LIMITS, 64).run(
            lambda: OpenEnv(openenv, index, action_field="number", observation_field="hint"),
            lambda: session_of(saying(bisecting), TOKENIZER, ENDS),
        )

    async def play_all() -> list[Episode]:
        return [episode for _ in range(3) for episode in await asyncio.gather(*map(play, range(8)))]

    episodes = asyncio.run(play_all())
    assert [episode.end for episode in episodes] == ["done"] * 24, episodes[0].error
    assert all(episode.reward == 1.0 and 1 <= episode.metrics["turns"] <= 5 for episode in episodes)
    texts = [TOKENIZER.decode(episode.rows[0].tokens) for episode in episodes]
    assert texts[:8] == texts[8:16] and len(set(texts)) > 2  # the index determines the game


def played(questions: list[Question], *replies: str, limits: EpisodeLimits = LIMITS) -> list[Episode]:
    async def play() -> list[Episode]:
        endpoint = AgentEndpoint()
        await endpoint.start()
        runner = AgentRunner(solve, endpoint, limits, 64)
        try:
            return list(await asyncio.gather(*(
                runner.run(question, lambda: session_of(scripted(TOKENIZER, replies), TOKENIZER, ENDS))
                for question in questions
            )))  # fmt: skip
        finally:
            await endpoint.aclose()

    return asyncio.run(asyncio.wait_for(play(), 120))


def test_tasks_of_verifiers_are_exact_rows_with_their_weighted_rewards(tasks: list[Question]) -> None:
    assert len(tasks) == 10
    episodes = played(tasks, "5", "4")
    assert [episode.end for episode in episodes] == ["done"] * 10, episodes[0].error
    assert [TOKENIZER.decode(episode.rows[0].tokens) for episode in episodes] == [
        f"{number}+1?<sep>5<eos>\nsure?<sep>4<eos>" for number in range(10)
    ]
    assert [episode.reward for episode in episodes] == [2.5 if number == 3 else 0.5 for number in range(10)]
