"""The code, the settings and the commands of the pages on environments and agents work as the pages say."""

from __future__ import annotations

import importlib
import json
import random
import runpy
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.run.before_start.dry_run import dry_run
from rollout_server.episodes.agents import AgentProcess, AgentRunner, load_agent
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.demonstrations import load_oracle
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.env import QuestionEnv, load_env
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.episodes.tools.tool import load_tools
from rollout_server.question import Question
from rollout_server.rewards.rules import gsm8k
from tests.kit.assembled import run_assembled
from tests.kit.documents import DOCUMENTS, ROOT, blocks
from tests.kit.episodes.sessions import scripted
from tests.kit.models import save_tool_model
from tests.kit.tokenizers import end_tokens, tokenizer_of
from tests.kit.virtual_environments import new_environment

EPISODES = DOCUMENTS["docs/tutorials/tools-and-turns.md"] + DOCUMENTS["docs/how-to/environments.md"]
AGENTS = DOCUMENTS["docs/how-to/agents.md"]
MODULES = {
    "my_tools": (EPISODES, 0), "make_orders": (EPISODES, 1), "my_search": (EPISODES, 2), "my_env": (EPISODES, 3),
    "pydantic_agent": (AGENTS, 2),
}  # fmt: skip
"""The modules that the pages show, and that a reader copies."""
SHOP = ROOT / "configs" / "shop_agent_cpu.yaml"
CONFIGS = {"orders": (EPISODES, 0), "env": (EPISODES, 1), "agent": (AGENTS, 0), "pydantic": (AGENTS, 1),
           "verifiers": (AGENTS, 2)}  # fmt: skip
LIMITS = EpisodeLimits(tool_s=5, turn_s=5, episode_s=20)
SIZES = SessionLimits(max_tokens=4000, max_reply_tokens=200, max_turns=6)
CALLS = '<tool_call>\n{"name": "price", "arguments": {"item": "apple"}}\n</tool_call>\n' * 2
QUESTION = Question(messages=({"role": "user", "content": "2 apple(s)?"},), ground_truth="6")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a reader who has copied all that the pages show, and ran the two scripts."""
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
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("make_orders")
    runpy.run_path("configs/shop/orders.py", run_name="__main__")
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def session(*replies: str) -> Session:
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    reader = ReplyReader(tokenizer, ends, JsonParser("hermes"))
    return Session(scripted(tokenizer, replies), TurnRenderer(tokenizer, ends), reader, SIZES)


@pytest.mark.anyio
async def test_a_model_that_calls_the_function_is_rewarded(folder: Path) -> None:
    (make,) = load_tools(load_config(folder / "orders.yaml").task.tools)
    episode = await EnvRunner(LIMITS, 4).run(
        lambda: QuestionEnv(QUESTION, make()), lambda: session(CALLS, "They cost 3 each.\n#### 6")
    )
    assert episode.end == "done" and gsm8k(QUESTION, episode.answer) == 1.0
    text = tokenizer_of("qwen2_5").decode(episode.rows[0].tokens)
    assert "Look up the price of an item in dollars." in text and "<tool_response>\n3\n</tool_response>" in text


@pytest.mark.anyio
async def test_the_environment_of_the_page_is_played(folder: Path) -> None:
    task = load_config(folder / "env.yaml").task
    make = load_env(task.env, task.params, False)
    secret = make(None, 3, 0).secret  # type: ignore[attr-defined]

    async def play(*replies: str) -> Episode:
        return await EnvRunner(LIMITS, 4).run(lambda: make(None, 3, 0), lambda: session(*replies))

    wrong = str((secret + 1) % 31)
    found = await play(wrong, str(secret))
    assert (found.end, found.reward, found.metrics["turns"]) == ("done", 1.0, 2)
    assert ("lower" if int(wrong) > secret else "higher") in tokenizer_of("qwen2_5").decode(found.rows[0].tokens)
    assert (await play("a number")).reward == 0.0


@pytest.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    endpoint = AgentEndpoint()
    await endpoint.start()
    yield endpoint
    await endpoint.aclose()


@pytest.mark.anyio
async def test_the_agent_of_the_page_is_one_row(folder: Path, endpoint: AgentEndpoint) -> None:
    agent, oracle = load_agent(load_config(folder / "agent.yaml").task.agent), load_oracle(load_config(SHOP).sft.oracle)
    question = Question(messages=({"role": "user", "content": "What do 2 apples cost?"},), ground_truth="6")
    rng = random.Random(2)  # which does not make it wrong
    call = oracle(question.messages, rng)  # type: ignore[arg-type]
    answer = oracle([*question.messages, {"role": "tool", "content": "3"}], rng)  # type: ignore[list-item]
    assert call == CALLS.partition("\n<tool_call>")[0] and answer == "#### 6"
    episode = await AgentRunner(agent, endpoint, LIMITS, 4).run(question, lambda: session(call, answer))
    assert (episode.end, episode.reward, len(episode.rows)) == ("done", 1.0, 1), episode.error
    assert episode.metrics["turns"] == 2


@pytest.mark.anyio
@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_the_framework_of_the_page_runs_in_a_process_of_its_own(
    folder: Path, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    python = new_environment(folder / "agent-venv", ("pydantic-ai-slim[openai]==2.68.0",), sees_ours=False)
    assert str(python).endswith(load_config(folder / "pydantic.yaml").task.agent_python)
    agent = AgentProcess("pydantic_agent:solve", folder / "agent.log", str(python))
    limits = EpisodeLimits(tool_s=5, turn_s=60, episode_s=90)
    try:
        episode = await AgentRunner(agent, endpoint, limits, 4).run(QUESTION, lambda: session(CALLS, "#### 6"))
    finally:
        await agent.aclose()
    assert (episode.end, episode.reward, len(episode.rows)) == ("done", 1.0, 1), episode.error
    text = tokenizer_of("qwen2_5").decode(episode.rows[0].tokens)
    assert "<tool_response>\n3\n</tool_response>" in text and episode.metrics["turns"] == 2


def overrides(folder: Path) -> list[str]:
    save_tool_model(folder / "model")
    return [f"model.path={folder / 'model'}", f"run.dir={folder / 'runs'}"]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:task.eval_path is not set")
def test_the_settings_of_the_pages_pass_the_checks_of_a_start(folder: Path) -> None:
    for name in CONFIGS:
        config = load_config(folder / f"{name}.yaml", overrides(folder))
        if name == "orders":
            assert "longest sequence" in dry_run(config)


def test_the_shipped_tool_user_has_its_tools(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    files = [f"task.path={folder / 'orders.jsonl'}", f"task.eval_path={folder / 'orders.jsonl'}"]
    config = load_config(ROOT / "configs" / "gsm8k_tools.yaml", files)
    tools = {tool.name: tool.function for make in load_tools(config.task.tools) for tool in make()}
    assert tools["calculate"]("(3 + 4) * 2") == "14"  # type: ignore[misc]
    assert "a dozen is 12" in tools["search"]("dozen")  # type: ignore[misc]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["orders", "agent", "env"])
def test_the_settings_of_the_pages_train(folder: Path, name: str) -> None:
    small = [
        "run.steps=2", "rollout.engine=hf", "learner.prompts_per_step=2", "rollout.group_size=2",
        "rollout.max_response_tokens=12", "eval.num_prompts=0", "algorithm.filter_zero_variance=false",
        "logging.wandb=disabled", "weight_sync.transport=disk",
        "rollout.max_episode_tokens=1024",  # the tokenizer of tests takes many tokens for the tools
    ]  # fmt: skip
    config = load_config(folder / f"{name}.yaml", [*overrides(folder), *small])
    (config.run_dir / "logs").mkdir(parents=True)
    done = run_assembled(config)
    assert len(done.steps) == 2 and done.counters["buffer/trained"] >= 4 and done.counters["buffer/unaccounted"] == 0
