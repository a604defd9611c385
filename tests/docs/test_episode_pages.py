"""The code, the settings and the commands of docs/episodes.md and docs/agents.md work as the pages say."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.pipeline import dry_run
from rollout_server.episodes.agent_process import AgentProcess
from rollout_server.episodes.agents import AgentRunner
from rollout_server.episodes.env_runner import EnvRunner
from rollout_server.episodes.episode import Episode, EpisodeLimits
from rollout_server.episodes.load import load_agent, load_env
from rollout_server.episodes.openai_endpoint import OpenAIEndpoint
from rollout_server.episodes.question_env import QuestionEnv
from rollout_server.episodes.rendering import TurnRenderer
from rollout_server.episodes.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.session import Session, SessionLimits
from rollout_server.episodes.tools import load_tools
from rollout_server.question import Question
from rollout_server.rewards.rules import gsm8k
from tests.docs.test_readme import DOCUMENTS, ROOT, blocks
from tests.e2e.assembled import run_assembled
from tests.rollout_server.episodes.fake_engine import scripted
from tests.rollout_server.episodes.packages.environment import new_environment
from tests.rollout_server.episodes.tokenizers import end_tokens, tokenizer_of
from tests.rollout_server.episodes.tool_model import save_tool_model

EPISODES, AGENTS = DOCUMENTS["docs/episodes.md"], DOCUMENTS["docs/agents.md"]
MODULES = {
    "my_tools": (EPISODES, 0), "make_orders": (EPISODES, 1), "my_search": (EPISODES, 2), "my_env": (EPISODES, 3),
    "my_agent": (AGENTS, 0), "train_agent": (AGENTS, 1), "pydantic_agent": (AGENTS, 2),
}  # fmt: skip
"""The modules that the pages show, in order."""
CONFIGS = {"orders": (EPISODES, 0), "env": (EPISODES, 1), "agent": (AGENTS, 0), "pydantic": (AGENTS, 1),
           "verifiers": (AGENTS, 2)}  # fmt: skip
LIMITS = EpisodeLimits(tool_s=5, turn_s=5, episode_s=20)
SIZES = SessionLimits(max_tokens=4000, max_reply_tokens=200, max_turns=6)
CALLS = '<tool_call>\n{"name": "price", "arguments": {"item": "apple"}}\n</tool_call>\n' * 2
QUESTION = Question(messages=({"role": "user", "content": "2 apple(s)?"},), answer="6")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a reader who has copied all that the pages show, and ran make_orders.py."""
    for name, (page, place) in MODULES.items():
        (tmp_path / f"{name}.py").write_text(blocks(page, "python")[place])
    for name, (page, place) in CONFIGS.items():
        (tmp_path / f"{name}.yaml").write_text(blocks(page, "yaml")[place])
    (tmp_path / "tasks.jsonl").write_text(json.dumps({
        "data_source": "verifiers/my_taskset", "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"address": "tcp://127.0.0.1:5005"},
    }))  # fmt: skip
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "fruit.txt").write_text("A melon is a fruit.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("make_orders")
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def session(*replies: str) -> Session:
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    reader = ReplyReader(tokenizer, ends, JsonParser("hermes"))
    return Session(scripted(tokenizer, replies), TurnRenderer(tokenizer, ends), reader, SIZES)


def test_the_pages_show_no_more_code_than_is_tested() -> None:
    for language, shown in (("python", MODULES), ("yaml", CONFIGS)):
        for page in (EPISODES, AGENTS):
            places = [place for text, place in shown.values() if text == page]
            assert places == list(range(len(blocks(page, language))))


def test_the_way_from_a_function_to_a_tool_user_takes_fifty_lines() -> None:
    way = EPISODES.partition("## From a function")[2].partition("\n## ")[0]
    shown = [line for language in ("python", "yaml", "bash") for block in blocks(way, language)
             for line in block.splitlines() if line.strip()]
    assert len(shown) <= 50


def test_the_orders_have_the_right_answers(folder: Path) -> None:
    lines = (folder / "orders.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    prices = importlib.import_module("my_tools").PRICES
    words = row["prompt"][0]["content"].partition(" cost?")[0].replace("(s)", "").split()
    counts = {words[i + 1]: int(words[i]) for i in range(len(words) - 1) if words[i].isdecimal()}
    assert sum(count * prices[item] for item, count in counts.items()) == int(row["reward_model"]["ground_truth"])
    assert len(lines) == 2000 and len(counts) == 2


def test_a_model_that_calls_the_function_is_rewarded(folder: Path) -> None:
    (make,) = load_tools(load_config(folder / "orders.yaml").task.tools)

    async def play() -> Episode:
        return await EnvRunner(LIMITS, 4).run(
            lambda: QuestionEnv(QUESTION, make()), lambda: session(CALLS, "They cost 3 each.\n#### 6")
        )

    episode = asyncio.run(play())
    assert episode.end == "done" and gsm8k(episode.answer, QUESTION.answer) == 1.0
    text = tokenizer_of("qwen2_5").decode(episode.rows[0].tokens)
    assert "Look up the price of an item in dollars." in text and "<tool_response>\n3\n</tool_response>" in text


def test_the_search_of_the_page_finds_its_notes(folder: Path) -> None:
    (make,) = load_tools(["my_search:search"])
    assert make()[0].function("melon") == "[fruit.txt] A melon is a fruit."  # type: ignore[misc]


def test_the_environment_of_the_page_is_played(folder: Path) -> None:
    task = load_config(folder / "env.yaml").task
    make = load_env(task.env, task.params, False)
    secret = make(None, 3, 0).secret  # type: ignore[attr-defined]

    async def play(*replies: str) -> Episode:
        return await EnvRunner(LIMITS, 4).run(lambda: make(None, 3, 0), lambda: session(*replies))

    wrong = str((secret + 1) % 31)
    found = asyncio.run(play(wrong, str(secret)))
    assert (found.end, found.reward, found.metrics["turns"]) == ("done", 1.0, 2)
    assert ("lower" if int(wrong) > secret else "higher") in tokenizer_of("qwen2_5").decode(found.rows[0].tokens)
    assert asyncio.run(play("a number")).reward == 0.0


def test_the_agent_of_the_page_is_one_row(folder: Path) -> None:
    agent = load_agent(load_config(folder / "agent.yaml").task.agent)

    async def play() -> Episode:
        endpoint = OpenAIEndpoint()
        await endpoint.start()
        try:
            return await AgentRunner(agent, endpoint, LIMITS, 4).run(QUESTION, lambda: session(CALLS, "#### 6"))
        finally:
            await endpoint.aclose()

    episode = asyncio.run(play())
    assert (episode.end, episode.reward, len(episode.rows)) == ("done", 1.0, 1), episode.error
    assert episode.metrics["turns"] == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_framework_of_the_page_runs_in_a_process_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    python = new_environment(folder / "agent-venv", ("pydantic-ai-slim[openai]==2.68.0",), sees_ours=False)
    assert str(python).endswith(load_config(folder / "pydantic.yaml").task.agent_python)

    async def play() -> Episode:
        endpoint = OpenAIEndpoint()
        await endpoint.start()
        agent = AgentProcess("pydantic_agent:solve", folder / "agent.log", str(python))
        try:
            return await AgentRunner(agent, endpoint, EpisodeLimits(tool_s=5, turn_s=60, episode_s=90), 4).run(
                QUESTION, lambda: session(CALLS, "#### 6")
            )
        finally:
            await agent.aclose()
            await endpoint.aclose()

    episode = asyncio.run(play())
    assert (episode.end, episode.reward, len(episode.rows)) == ("done", 1.0, 1), episode.error
    text = tokenizer_of("qwen2_5").decode(episode.rows[0].tokens)
    assert "<tool_response>\n3\n</tool_response>" in text and episode.metrics["turns"] == 2


def overrides(folder: Path) -> list[str]:
    save_tool_model(folder / "model")
    return [f"model.path={folder / 'model'}", f"run.dir={folder / 'runs'}"]


@pytest.mark.filterwarnings("ignore:task.eval_path is not set")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_of_the_pages_pass_the_dry_run(folder: Path, name: str) -> None:
    python = "task.agent_python=" + sys.executable if name == "pydantic" else "run.seed=1"
    assert "longest sequence" in dry_run(load_config(folder / f"{name}.yaml", [*overrides(folder), python]))


def test_the_shipped_tool_user_passes_the_dry_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    files = [f"task.path={folder / 'orders.jsonl'}", f"task.eval_path={folder / 'orders.jsonl'}"]
    config = load_config(ROOT / "configs" / "gsm8k_tools.yaml", [*overrides(folder), *files])
    assert "longest sequence" in dry_run(config)
    tools = {tool.name: tool.function for make in load_tools(config.task.tools) for tool in make()}
    assert tools["calculate"]("(3 + 4) * 2") == "14"  # type: ignore[misc]
    assert "a dozen is 12" in tools["search"]("dozen")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["orders", "agent", "env"])
def test_the_settings_of_the_pages_train(folder: Path, name: str) -> None:
    small = [
        "run.steps=2", "rollout.engine=hf", "learner.prompts_per_step=2", "rollout.group_size=2",
        "rollout.max_response_tokens=12", "eval.size=0", "algorithm.filter_zero_variance=false",
        "logging.wandb=disabled", "weight_sync.transport=disk",
    ]  # fmt: skip
    config = load_config(folder / f"{name}.yaml", [*overrides(folder), *small])
    (config.run_dir / "logs").mkdir(parents=True)
    run = run_assembled(config)
    assert len(run.steps) == 2 and run.counters["buffer/trained"] >= 4 and run.counters["buffer/unaccounted"] == 0
