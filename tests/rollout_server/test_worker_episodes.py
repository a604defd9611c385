"""The worker with episodes of several turns: environments, agents, faults, and pushes that drain."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config import Config, StalenessConfig, TaskConfig, TimeoutsConfig, WeightSyncConfig
from async_rl.base.types import Group
from buffer.client import LearnerClient
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult
from rollout_server.tasks.base import open_task
from rollout_server.worker.worker import ScoredPlayer, Worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER, TalkingEngine, follow
from tests.kit.episodes.envs_and_agents import CASES, no_reward
from tests.kit.models import save_tiny_model
from tests.kit.worker import metric_values, plain_reward, rolled_out

CHAIN = "rollout_server.episodes.environments.chain:Chain"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_tiny_model("tiny-qwen2", tmp_path, seed=0)
    config = worker_config(tmp_path)
    task = TaskConfig(env=CHAIN, size=50, max_prompt_tokens=16, params={"mean_s": 0.0}, max_failures=5)
    rollout = replace(config.rollout, max_episode_tokens=200, max_turns=32)
    timeouts = TimeoutsConfig(generate_s=20, buffer_s=5, batch_s=20, shutdown_s=5, turn_s=0.3)
    return replace(config, task=task, rollout=rollout, timeouts=timeouts)


def texts(group: Group) -> list[str]:
    return [TOKENIZER.decode(np.concatenate([group.prompt_tokens, r.tokens])) for r in group.rows]


def test_episodes_of_an_environment_become_groups_with_turns_and_rewards(config: Config) -> None:
    batches, reports, _, _ = rolled_out(config, TalkingEngine(follow), no_reward, steps=3)
    groups = [group for batch in batches for group in batch.groups]
    for group in groups:
        assert TOKENIZER.decode(group.prompt_tokens)[1:] == "<sep>"
        assert [episode.rows for episode in group.episodes] == [1, 1, 1]
        assert group.episode_rewards == [0.0, 1.0, 1.0]
        assert [episode.turns for episode in group.episodes] == [len(r.turn_ends) for r in group.rows]
        for row, text, episode in zip(group.rows, texts(group), group.episodes, strict=True):
            replies = [part.partition("<eos>")[0] for part in text.split("<sep>")[1:]]
            said = TOKENIZER.decode(row.tokens[row.mask])
            assert said == "".join(reply + "<eos>" for reply in replies)
            assert (row.logprobs[~row.mask] == 0).all()
            assert set(row.tokens[list(row.turn_ends)].tolist()) == {TOKENIZER.eos_token_id}
            assert sum(row.turn_rewards) == row.reward and episode.end == "done"
            assert episode.metrics["links"] == max(0, len(replies) - 1)
    assert max(episode.turns for group in groups for episode in group.episodes) > 3
    values = metric_values(reports)
    assert values["episode/turns"] > 1 and values["episode/end_done"] == 1 and values["episode/failed"] == 0
    assert values["episode/sampled_tokens"] > values["episode/observed_tokens"] > 0


def test_named_rewards_are_added_to_those_of_an_environment(config: Config) -> None:
    def turns(question: Question, episode: Episode) -> RewardResult:
        return RewardResult(len(episode.messages) / 100, {"messages": len(episode.messages)})

    rewards = [plain_reward(config, turns, name="long", reward=Reward(function=turns, of="episode"), logs_score=True)]
    (batch,), *_ = rolled_out(config, TalkingEngine(follow), rewards)
    for group in batch.groups:
        for row, episode in zip(group.rows, group.episodes, strict=True):
            messages = 2 * episode.turns  # each reply answers one message
            assert row.rewards == {"env": row.rewards["env"], "long": messages / 100, "long/messages": messages}
            assert row.reward == pytest.approx(row.rewards["env"] + messages / 100)
        assert [row.rewards["env"] for row in group.rows] == [0.0, 1.0, 1.0]


def test_an_environment_that_raises_or_hangs_costs_only_its_own_group(config: Config) -> None:
    task = replace(config.task, env=f"{CASES}:Silent", params={})
    engine = TalkingEngine(lambda last, number, n: last)
    batches, reports, server, _ = rolled_out(replace(config, task=task), engine, no_reward, steps=4)
    task_of = open_task(replace(config, task=task), TOKENIZER)
    for group in (group for batch in batches for group in batch.groups):
        index = task_of.prompt(group.prompt_index).question.ground_truth
        assert index % 5 != 1, "all its episodes raise"
        if index % 5 == 2:  # zero by task.on_timeout, with the turn that was sampled
            assert group.episode_rewards == [0.0] * 3 and {r.finish_reason for r in group.rows} == {"timeout"}
        else:
            assert group.episode_rewards == [2.5] * 3
            assert {r.turn_rewards for r in group.rows} == {(0.5, 2.0)}
            assert group.episodes[0].metrics == {"turns_seen": 2.0}
    notes = [note for report in reports for note in report.notes]
    assert sum("`failed`" in note and "KeyError: 'no unit', at " in note for note in notes) == 1
    assert sum("`timeout`" in note for note in notes) == 1
    values = metric_values(reports)
    assert values["episode/failed"] >= 6 and values["episode/timeouts"] >= 3
    assert server.counters()["buffer/dropped_failed"] >= 1


def test_a_push_that_drains_waits_for_whole_episodes(config: Config) -> None:
    """Episodes wait most of the time, and the push for them. While it runs the engine gets no request."""
    config = changed(
        config, staleness=StalenessConfig(max=4), weight_sync=WeightSyncConfig(on_update="drain"),
        task={"params": {"mean_s": 0.02}}, timeouts={"turn_s": 10, "episode_s": 20},
    )
    engine = TalkingEngine(follow, delay_s=0.01)
    seen: Counter[str] = Counter()

    def learn(address: str) -> None:
        client = LearnerClient(address, config.timeouts)
        client.served(0)
        for version in range(4):
            sampled = [r.versions[r.mask] for group in client.take(version).groups for r in group.rows]
            seen["of two versions"] += sum(len(set(versions.tolist())) > 1 for versions in sampled)
            client.trained(version + 1)
            client.await_push(version + 1)
            before = len(engine.requests)
            seen["running"] += engine.num_running
            asyncio.run(asyncio.sleep(0.3))  # the push
            seen["begun"] += len(engine.requests) - before
            engine.version = version + 1
            client.served(version + 1)
        client.close()

    async def run(address: str) -> None:
        player = ScoredPlayer(config, 0, engine, open_task(config, TOKENIZER), (), TOKENIZER)
        worker = Worker(config, player, address)

        async def collect() -> None:
            async for _ in worker.run():
                pass

        collecting = asyncio.create_task(collect())
        learning = asyncio.create_task(asyncio.to_thread(learn, address))
        await asyncio.wait((collecting, learning), return_when=asyncio.FIRST_COMPLETED)
        await worker.stop()
        await asyncio.gather(collecting, return_exceptions=True)
        await learning

    with serving(config) as server:
        asyncio.run(asyncio.wait_for(run(server.address), 60))
    assert seen == {"running": 0, "begun": 0, "of two versions": 0}
