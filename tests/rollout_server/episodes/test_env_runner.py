from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from async_rl.base.errors import ProcessDiedError
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message
from rollout_server.episodes.env import QuestionEnv, Step
from rollout_server.episodes.episode import EPISODE_METRICS, Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.question import Question
from tests.kit.episodes.scripted_env import DONE, END, LIMITS, MORE, TOKENIZER, Scripted, played
from tests.kit.episodes.sessions import session_of

QUESTION = Question(messages=({"role": "user", "content": "2+2?"},), ground_truth="4")


def text_of(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(row.tokens) for row in episode.rows]


def test_an_answer_without_a_tool_call_ends_the_episode_of_a_question() -> None:
    episode = played(QuestionEnv(QUESTION, []), replies=["4"])
    assert text_of(episode) == ["2+2?<sep>4<eos>"] and episode.answer == "4"
    assert (episode.end, episode.reward, episode.error) == ("done", 0.0, "")
    assert episode.with_reward(1.0).reward == 1.0
    assert episode.metrics.keys() == set(EPISODE_METRICS)
    assert episode.metrics["turns"] == 1 and episode.metrics["sampled_tokens"] == 2


def test_an_environment_and_the_model_speak_in_turn() -> None:
    env = Scripted(MORE, MORE, Step(done=True, reward=1.0, metrics={"found": 3.0}))
    episode = played(env)
    assert text_of(episode) == ["go<sep>a<eos>\nmore<sep>b<eos>\nmore<sep>c<eos>"]
    assert env.seen == ["a", "b", "c"] and env.num_closed == 1
    assert episode.rows[0].turn_rewards == (0.25, 0.25, 1.0) and episode.reward == 1.5
    metrics = episode.metrics
    # \n m o r e <sep> is observed twice; three replies of a letter and <eos> are sampled.
    assert (metrics["turns"], metrics["sampled_tokens"], metrics["observed_tokens"]) == (3, 6, 12)
    assert metrics["env/found"] == 3.0 and metrics["timeouts"] == metrics["failed"] == 0


@pytest.mark.parametrize(
    ("sizes", "end", "num_turns"), [({"max_turns": 2}, "turns", 2), ({"max_tokens": 13}, "length", 2)]
)
def test_an_episode_without_room_ends_as_it_stands(sizes: dict[str, int], end: str, num_turns: int) -> None:
    env = Scripted(MORE, MORE, DONE)
    episode = played(env, sizes=sizes)
    assert (episode.end, episode.metrics["turns"], episode.reward) == (end, num_turns, 0.25 * num_turns)
    assert episode.rows[-1].finish_reason == "length" and env.num_closed == 1
    assert episode.metrics["failed"] == 0


async def hang() -> None:
    await asyncio.sleep(60)


async def hang_on() -> None:
    """Ignores that it is cancelled, for a while."""
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue


async def fail() -> None:
    raise KeyError("oops")


@pytest.mark.parametrize(("on_timeout", "rewards"), [("zero", [0.0]), ("partial", [0.25]), ("drop", [])])
def test_an_episode_that_runs_out_of_time_keeps_its_whole_turns(on_timeout: Any, rewards: list[float]) -> None:
    limits = EpisodeLimits(tool_s=5, turn_s=0.1, episode_s=10, on_timeout=on_timeout)
    env = Scripted(MORE, MORE, DONE, act=hang)
    episode = played(env, limits=limits)
    assert episode.end == "timeout" and "step" in episode.error
    assert [sum(row.turn_rewards) for row in episode.rows] == rewards
    assert [row.finish_reason for row in episode.rows] == ["timeout"] * len(rewards)
    assert (env.num_closed, episode.metrics["timeouts"], episode.metrics["failed"]) == (1, 1, 0)


def test_the_time_of_the_whole_episode_is_limited() -> None:
    async def rest() -> None:
        await asyncio.sleep(0.1)

    limits = EpisodeLimits(tool_s=5, turn_s=5, episode_s=0.35, on_timeout="partial")
    env = Scripted(*[MORE] * 9, act=rest)
    episode = played(env, limits=limits, replies=["a"] * 9)
    assert episode.end == "timeout" and "timeouts.episode_s" in episode.error and env.num_closed == 1
    assert episode.metrics["turns"] < 9


def test_an_environment_that_ignores_its_limit_is_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.episodes.user_code.CANCEL_S", 0.1)
    limits = EpisodeLimits(tool_s=5, turn_s=0.1, episode_s=10)
    episode = played(Scripted(MORE, DONE, act=hang_on), limits=limits)
    assert episode.end == "timeout" and episode.metrics["given_up_calls"] == 1


async def leave() -> None:
    sys.exit(2)


class Leaves(Scripted):
    """Would end the event loop before it starts, and when it is closed."""

    async def start(self) -> list[Message]:
        sys.exit(2)

    async def close(self) -> None:
        await super().close()
        sys.exit(2)


@pytest.mark.parametrize(("make", "error"), [
    (lambda: Scripted(MORE, DONE, act=fail), "KeyError: 'oops'"),
    (lambda: Scripted(MORE, DONE, act=leave), "SystemExit: 2"), (lambda: Leaves(MORE), "SystemExit: 2"),
])
def test_an_environment_that_raises_is_replaced_once(make: Callable[[], Scripted], error: str) -> None:
    bad, good = make(), Scripted(DONE)
    episode = played(bad, good)
    assert (episode.end, episode.reward, episode.metrics["failed"]) == ("done", 1.0, 1)
    assert bad.num_closed == good.num_closed == 1
    assert text_of(episode) == ["go<sep>a<eos>"]
    episode = played(make(), make())
    assert (episode.end, episode.rows, episode.metrics["failed"]) == ("failed", (), 2)
    assert error in episode.error and f"at {__file__}:" in episode.error


@pytest.mark.parametrize(("step", "named"), [
    ({"reward": float("nan")}, "reward "), ({"reward": -(10**5000)}, "reward "),
    ({"metrics": {str(i): 0.0 for i in range(100)}}, "metrics "), ({"metrics": {"\ud800": 0.0}}, "metric "),
    ({"metrics": {"a": "b"}}, "metric a "), ({"done": False}, "messages"), (None, "Step"),
    ({"messages": ({"role": "assistant", "content": "me"},), "done": False}, "assistant"),
    ({"messages": "more", "done": False}, "messages "), ({"messages": np.zeros(2), "done": False}, "ValueError"),
], ids=range(10))  # fmt: skip
def test_a_wrong_step_is_the_fault_of_its_environment(step: dict[str, Any] | None, named: str) -> None:
    steps = [{"done": True} if step is None else Step(**{"done": True, **step}) for _ in range(2)]
    episode = played(*(Scripted(each) for each in steps))  # type: ignore[arg-type]
    assert episode.end == "failed" and re.search(named, episode.error), episode.error


def test_tasks_that_an_environment_leaves_behind_are_ended_and_counted() -> None:
    ended = []

    async def forgotten() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def leak() -> None:
        asyncio.create_task(forgotten())  # noqa: RUF006
        asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006
        await asyncio.sleep(0)

    episode = played(Scripted(MORE, DONE, act=leak))
    assert (episode.end, episode.metrics["leaked_tasks"], ended) == ("done", 1, [True])


def test_an_engine_that_fails_ends_the_run_and_not_the_episode() -> None:
    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        raise ProcessDiedError("the server is gone")

    env = Scripted(DONE)
    with pytest.raises(ProcessDiedError):
        played(env, generate=generate)
    assert env.num_closed == 1


def test_a_cancelled_episode_closes_its_environment_and_its_requests() -> None:
    ended = []

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("engine")
        raise AssertionError

    async def play() -> None:
        env = Scripted(DONE)
        runner = EnvRunner(LIMITS, 1)
        playing = asyncio.create_task(runner.run(lambda: env, lambda: session_of(generate, TOKENIZER, [END])))
        await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled() and ended == ["engine"] and env.num_closed == 1

    asyncio.run(play())
