from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from async_rl.base.errors import ProcessDiedError
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.agents import AgentRunner
from rollout_server.episodes.conversation.session import SessionLimits
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EpisodeLimits
from rollout_server.question import Question
from tests.kit.episodes.sessions import scripted, session_of

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
QUESTION = Question(messages=({"role": "user", "content": "2+2?"},), ground_truth="4")
LIMITS = EpisodeLimits(tool_s=5, turn_s=5, episode_s=10)


async def ask(llm: openai.AsyncOpenAI, messages: list[Any]) -> str:
    answer = await llm.chat.completions.create(model="policy", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return answer.choices[0].message.content or ""


async def two_turns(question: Question, base_url: str, api_key: str) -> float:
    """Asks, asks for a check, and scores the second reply."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        messages: list[Any] = list(question.messages)
        await ask(llm, messages)
        messages.append({"role": "user", "content": "sure?"})
        return float(await ask(llm, messages) == question.ground_truth)


def played(agent: Any, *replies: str, limits: EpisodeLimits = LIMITS, generate: Any = None, **sizes: int) -> Episode:
    session_limits = SessionLimits(**{"max_tokens": 200, "max_reply_tokens": 20, "max_turns": 9, **sizes})

    async def play() -> Episode:
        endpoint = AgentEndpoint()
        await endpoint.start()
        try:
            return await AgentRunner(agent, endpoint, limits, 8).run(
                QUESTION,
                lambda: session_of(generate or scripted(TOKENIZER, replies), TOKENIZER, [END], session_limits),
            )
        finally:
            await endpoint.aclose()

    return asyncio.run(asyncio.wait_for(play(), 30))


def text_of(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(row.tokens) for row in episode.rows]


def test_an_agent_that_knows_nothing_of_training_is_one_exact_row() -> None:
    episode = played(two_turns, "5", "4")
    assert text_of(episode) == ["2+2?<sep>5<eos>\nsure?<sep>4<eos>"]
    assert (episode.end, episode.reward, episode.answer) == ("done", 1.0, "4")
    assert episode.rows[0].turn_rewards == (0.0, 1.0) and episode.metrics["leaked_tasks"] == 0


def raising(error: BaseException, *, before_asking: bool = False, times: int = 99) -> Any:
    """An agent that raises so many times, after it has asked twice or before, and then works."""
    left = times

    async def agent(question: Question, base_url: str, api_key: str) -> float:
        nonlocal left
        left -= 1
        if left >= 0 and before_asking:
            raise error
        reward = await two_turns(question, base_url, api_key)
        if left >= 0:
            raise error
        return reward

    return agent


@pytest.mark.parametrize("before_asking", [True, False])
def test_an_agent_that_fails_for_no_fault_of_the_model_is_called_once_more(before_asking: bool) -> None:
    error = KeyError("oops") if before_asking else ConnectionResetError("oops")
    episode = played(raising(error, before_asking=before_asking, times=1), "5", "4")
    assert (episode.end, episode.reward, episode.metrics["failed"]) == ("done", 1.0, 1)
    episode = played(raising(error, before_asking=before_asking), "5", "4", "5", "4")
    assert (episode.end, episode.rows, episode.metrics["failed"]) == ("failed", (), 2)


@pytest.mark.parametrize(("error", "said"), [
    (KeyError("plum"), "KeyError: 'plum'"), (SystemExit(2), "SystemExit: 2"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
])  # fmt: skip
def test_an_agent_that_raises_after_a_reply_is_scored_zero_with_its_rows(error: BaseException, said: str) -> None:
    episode = played(raising(error), "5", "4")
    assert (episode.end, episode.reward, episode.metrics["failed"]) == ("error", 0.0, 0)
    assert text_of(episode) == ["2+2?<sep>5<eos>\nsure?<sep>4<eos>"]
    assert episode.rows[0].turn_rewards == (0.0, 0.0) and episode.rows[0].finish_reason == "stop"
    line = raising.__code__.co_firstlineno + 11
    assert episode.error.endswith(f"{said}, at {__file__}:{line}") and "in agent" in episode.traceback


@pytest.mark.parametrize("result", [None, float("nan")])
def test_an_agent_without_a_reward_fails(result: Any) -> None:
    async def agent(question: Question, base_url: str, api_key: str) -> Any:
        await two_turns(question, base_url, api_key)
        return result

    episode = played(agent, "5", "4")
    assert (episode.end, episode.rows, episode.metrics["failed"]) == ("failed", (), 2)
    assert str(result) in episode.error


def test_an_agent_that_never_asks_the_policy_fails() -> None:
    async def agent(question: Question, base_url: str, api_key: str) -> float:
        return 1.0

    episode = played(agent)
    assert episode.end == "failed" and "base_url" in episode.error


def test_an_agent_that_falls_silent_runs_out_of_time() -> None:
    async def agent(question: Question, base_url: str, api_key: str) -> float:
        await two_turns(question, base_url, api_key)
        await asyncio.sleep(600)  # longer than any test may take
        return 1.0

    limits = EpisodeLimits(tool_s=5, turn_s=0.5, episode_s=600, on_timeout="partial")
    episode = played(agent, "5", "4", limits=limits)
    assert (episode.end, episode.reward, episode.metrics["timeouts"]) == ("timeout", 0.0, 1)
    assert episode.rows[0].finish_reason == "timeout"


def test_a_slow_engine_is_not_the_agents_silence() -> None:
    inner = scripted(TOKENIZER, ["5", "4"])

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        await asyncio.sleep(0.8)
        return await inner(tokens, max_tokens)

    assert played(two_turns, generate=generate, limits=EpisodeLimits(tool_s=5, turn_s=0.6, episode_s=20)).end == "done"


def test_an_engine_that_fails_ends_the_run_and_not_the_episode() -> None:
    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        raise ProcessDiedError("the server is gone")

    with pytest.raises(ProcessDiedError):
        played(two_turns, generate=generate)
