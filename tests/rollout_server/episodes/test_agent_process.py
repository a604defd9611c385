from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.base.errors import ProcessDiedError
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.agents import AgentProcess, AgentRunner
from rollout_server.episodes.conversation.session import Session
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EpisodeLimits
from rollout_server.question import Question
from tests.kit.episodes import example_agents
from tests.kit.episodes.sessions import scripted, session_of

pytestmark = pytest.mark.processes

TOKENIZER = character_tokenizer()
PLACE = "tests.kit.episodes.example_agents"
LIMITS = EpisodeLimits(tool_s=5, turn_s=10, episode_s=20)


def played(
    name: str, folder: Path, *stages: list[dict[str, str]], limits: EpisodeLimits = LIMITS, module: str = PLACE,
    begin: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Episodes in one process of the agent, whose policy always answers 4. Each attempt calls `begin` as it begins.

    Args:
        stages: the extra_info of the questions that are played at once, one stage after the other.
    """

    def open_session() -> Session:
        begin()
        return session_of(scripted(TOKENIZER, ["4"] * 3), TOKENIZER, [TOKENIZER.eos_token_id])

    async def play() -> list[Episode]:
        endpoint, agent = AgentEndpoint(), AgentProcess(f"{module}:{name}", folder / "agent.log")
        await endpoint.start()
        runner, asked = AgentRunner(agent, endpoint, limits, 64), ({"role": "user", "content": "2+2?"},)
        known, episodes = {"marker": str(folder / "marker")}, list[Episode]()
        try:
            for stage in stages or [[{}]]:
                questions = [Question(messages=asked, ground_truth="4", extra=known | extra) for extra in stage]
                episodes += await asyncio.gather(*(runner.run(question, open_session) for question in questions))
            return episodes
        finally:
            await agent.aclose()
            await endpoint.aclose()

    return asyncio.run(asyncio.wait_for(play(), 100))


def test_many_episodes_share_the_process_of_an_agent(tmp_path: Path) -> None:
    folder = tmp_path / "no" / "folder" / "yet"
    episodes = played("solve", folder, [{}] * 20)
    assert [(episode.end, episode.reward) for episode in episodes] == [("done", 1.0)] * 20
    assert "working on 4" in (folder / "agent.log").read_text()  # what agents print does no harm


def test_modules_of_the_agent_win_over_those_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_code.py").write_text("from example_agents import solve as work\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(example_agents.__file__).parent))
    (episode,) = played("work", tmp_path, module="user_code")
    assert (episode.end, episode.reward) == ("done", 1.0), episode.error


def test_an_attempt_begins_once_its_process_has_imported_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the import counts in none of its time limits, nor does that of the process which replaces one that died."""
    (tmp_path / "told.py").write_text("from example_agents import solve_or_die\nopen('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(example_agents.__file__).parent))
    (episode,) = played("solve_or_die", tmp_path, module="told", begin=(tmp_path / "imported").unlink)
    assert (episode.end, episode.reward, episode.metrics["failed"]) == ("done", 1.0, 1), episode.error


def test_a_process_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match=" died 3 times "):
        played("die", tmp_path, [{}], [{}])


def acted(folder: Path, *acts: str, count: int) -> list[Episode]:
    """Episodes in one process of an agent: first those of `acts` at once, then `count` that work, one after the other.
    """
    return played("misbehave", folder, [{"act": act} for act in acts], *[[{"act": ""}]] * count)


ENDS = {
    "exit": ("error", 0, "SystemExit: 2"), "exit in a task": ("error", 0, "SystemExit: 2"),
    "cancel": ("failed", 2, "CancelledError"), "lose": ("failed", 2, "ConnectionResetError: gone"),
    "shout": ("error", 0, "RuntimeError: xxx"), "forget": ("failed", 2, "None"), "overshoot": ("failed", 2, "inf"),
}  # fmt: skip
"""[act of an agent] the end of its episode, how many attempts failed, a part of the error."""


def test_an_agent_that_ends_ends_no_other(tmp_path: Path) -> None:
    """What reads standard input gets nothing that is for the others."""
    episodes = acted(tmp_path, *ENDS, "read", "read itself", count=2)
    for (end, num_failed, said), bad in zip(ENDS.values(), episodes, strict=False):
        assert (bad.end, bad.metrics["failed"], bad.reward) == (end, num_failed, 0.0)
        assert said in bad.error and len(bad.error) < 3000
        assert said in ("None", "inf") or "misbehave" in bad.traceback
    good = episodes[len(ENDS) :]
    assert [(episode.end, episode.reward, episode.metrics["failed"]) for episode in good] == [("done", 1.0, 0)] * 4


@pytest.mark.parametrize("act", ["garble", "nest"])
def test_a_process_whose_output_is_no_reply_is_replaced(tmp_path: Path, act: str) -> None:
    (bad, *good) = acted(tmp_path, act, count=2)
    assert bad.end == "failed" and "signal 9" in bad.error
    assert [(episode.end, episode.reward) for episode in good] == [("done", 1.0)] * 2


def test_a_process_that_dies_is_noticed_although_its_children_live(tmp_path: Path) -> None:
    (bad, good) = acted(tmp_path, "fork and die", count=1)
    assert bad.end == "failed" and "exit code 3" in bad.error and str(tmp_path / "agent.log") in bad.error
    assert (good.end, good.reward) == ("done", 1.0)


def test_an_agent_is_cancelled_in_its_process(tmp_path: Path) -> None:
    limits = EpisodeLimits(tool_s=5, turn_s=3, episode_s=20, on_timeout="partial")
    (episode,) = played("hang", tmp_path, limits=limits)
    assert episode.end == "timeout" and len(episode.rows) == 1
    end_s = time.monotonic() + 5
    while not (tmp_path / "marker").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert (tmp_path / "marker").read_text() == "cancelled"


def test_an_agent_that_can_not_be_run_is_an_error_that_names_why(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match="'missing'"):
        played("missing", tmp_path)

    async def call() -> None:
        agent = AgentProcess(f"{PLACE}:solve", tmp_path / "agent.log", str(tmp_path / "python"))
        try:
            await agent(Question(messages=(), ground_truth=""), "", "")
        finally:
            await agent.aclose()

    with pytest.raises(ProcessDiedError, match=rf"{tmp_path}/python .*task\.agent_python"):
        asyncio.run(call())
