"""The code, the settings and the commands of the pages on environments and agents work as the pages say."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.cli import main
from async_rl.run.before_start.dry_run import dry_run
from rollout_server.episodes.agents import AgentProcess, AgentRunner, load_agent
from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.demonstrations import load_oracle
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.env import QuestionEnv, load_env
from rollout_server.episodes.episode import Episode, WholeRow
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.episodes.tools.tool import load_tools
from rollout_server.question import Question
from rollout_server.rewards.rules import gsm8k
from tests.kit.assembled import run_assembled
from tests.kit.documents import DOCUMENTS, ROOT, blocks, run
from tests.kit.episodes.sessions import scripted
from tests.kit.models import save_tool_model
from tests.kit.runs import logged
from tests.kit.tokenizers import end_tokens, tokenizer_of
from tests.kit.virtual_environments import new_environment

EPISODES = DOCUMENTS["docs/tutorials/tools-and-turns.md"] + DOCUMENTS["docs/how-to/environments.md"]
AGENTS = DOCUMENTS["docs/how-to/agents.md"]
MODULES = {
    "my_tools": (EPISODES, 0), "make_orders": (EPISODES, 1), "my_search": (EPISODES, 2), "my_env": (EPISODES, 3),
    "pydantic_agent": (AGENTS, 2),
}  # fmt: skip
"""The modules that the pages show, and that a reader copies."""
SHIPPED = {"configs/shop/agent.py": (AGENTS, 0), "configs/shop/training.py": (AGENTS, 1)}
"""The files of which the pages show a part."""
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


def test_the_pages_show_no_more_code_than_is_tested() -> None:
    for language, shown in (("python", MODULES | SHIPPED), ("yaml", CONFIGS)):
        for page in (EPISODES, AGENTS):
            places = sorted(place for text, place in shown.values() if text == page)
            assert places == list(range(len(blocks(page, language))))
    for file, (page, place) in SHIPPED.items():
        assert blocks(page, "python")[place].strip() in (ROOT / file).read_text()


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
    assert episode.end == "done" and gsm8k(QUESTION, episode.answer) == 1.0
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


def test_held_out_episodes_of_the_page_are_not_those_of_training(folder: Path) -> None:
    task = load_config(folder / "env.yaml").task
    make: Any = load_env(task.env, task.params, False)
    trained, held_out = [[make(None, sign * index, 0).secret for index in range(1, 9)] for sign in (1, -1)]
    assert trained != held_out


def test_the_agent_of_the_page_is_one_row(folder: Path) -> None:
    agent, oracle = load_agent(load_config(folder / "agent.yaml").task.agent), load_oracle(load_config(SHOP).sft.oracle)
    question = Question(messages=({"role": "user", "content": "What do 2 apples cost?"},), ground_truth="6")
    rng = random.Random(2)  # which does not make it wrong
    call = oracle(question.messages, rng)  # type: ignore[arg-type]
    answer = oracle([*question.messages, {"role": "tool", "content": "3"}], rng)  # type: ignore[list-item]
    assert call == CALLS.partition("\n<tool_call>")[0] and answer == "#### 6"

    async def play() -> Episode:
        endpoint = AgentEndpoint()
        await endpoint.start()
        try:
            return await AgentRunner(agent, endpoint, LIMITS, 4).run(question, lambda: session(call, answer))
        finally:
            await endpoint.aclose()

    episode = asyncio.run(play())
    assert (episode.end, episode.reward, len(episode.rows)) == ("done", 1.0, 1), episode.error
    assert episode.metrics["turns"] == 2


def test_thinking_that_an_agent_sends_back_is_one_row_and_stripped_it_is_one_a_turn() -> None:
    tokenizer, ends = tokenizer_of("qwen3"), end_tokens("qwen3")
    renderer, reader = TurnRenderer(tokenizer, ends), ReplyReader(tokenizer, ends, JsonParser("hermes"))

    async def rows(strips: bool) -> list[WholeRow]:
        session = Session(scripted(tokenizer, ["<think>\nhm\n</think>\n\nyes"] * 3), renderer, reader, SIZES)
        said = [user("is it?")]
        for _ in range(3):
            reply = (await session.reply(said)).message
            assert reply["content"] == "<think>\nhm\n</think>\n\nyes"
            if strips:
                reply = {**reply, "content": "yes"}
            said += [reply, user("sure?")]
        assert session.counts.rewritten == (2 if strips else 0)
        return session.rows()

    (whole,) = asyncio.run(rows(strips=False))
    assert tokenizer.decode(whole.tokens).count("<think>\nhm") == 3
    assert len(asyncio.run(rows(strips=True))) == 3


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_framework_of_the_page_runs_in_a_process_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    python = new_environment(folder / "agent-venv", ("pydantic-ai-slim[openai]==2.68.0",), sees_ours=False)
    assert str(python).endswith(load_config(folder / "pydantic.yaml").task.agent_python)

    async def play() -> Episode:
        endpoint = AgentEndpoint()
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


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:task.eval_path is not set")
def test_the_agent_of_the_page_can_be_followed_on_a_cpu(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The commands of the page with few steps: the tiny model has tools, and the agent is trained with it."""
    small = [
        f"run.dir={folder}/runs", "model.path=runs/shop-sft/model", "sft.steps=10", "sft.batch_size=2", "run.steps=2",
        "rollout.engine=hf", "learner.prompts_per_step=2", "rollout.group_size=2", "logging.wandb=disabled",
        "algorithm.filter_zero_variance=false", "weight_sync.transport=disk",
    ]  # fmt: skip
    assert main(["sft", "configs/shop_agent_cpu.yaml", *small]) == 0
    assert "20 episodes" in capfd.readouterr().out
    config = load_config(Path("configs/shop_agent_cpu.yaml"), small)
    (config.run_dir / "logs").mkdir(parents=True)
    done = run_assembled(config)
    assert len(done.steps) == 2 and done.counters["buffer/unaccounted"] == 0
    tokenizer = load_tokenizer(config.model.path)
    for group in (group for batch in done.batches for group in batch.groups):
        assert 0 <= group.data_row < 2000
        assert '<tools>\n{"type": "function", "function": {"name": "price"' in tokenizer.decode(group.prompt_tokens)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_the_agent_of_the_page_learns_on_a_cpu(folder: Path) -> None:
    for command in ("sft configs/shop_agent_cpu.yaml", "train configs/shop_agent_cpu.yaml rollout.engine=hf"):
        run(f"async-rl {command}", folder, timeout_s=1800)
    steps = logged(folder / "runs" / "shop")
    rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
    print(f"reward of the first five steps {mean(rewards[:5]):.2f}, of the last five {mean(rewards[-5:]):.2f}")
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2
