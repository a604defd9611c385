from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from async_rl.base.config import StalenessConfig
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.engines.base import GenerationRequest, Purpose, SampledReply
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.tasks.base import open_task
from rollout_server.worker.worker import ScoredPlayer
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.engines.replies import request_for
from tests.kit.worker import SCORED, kind_of, metric_values, plain_reward, rolled_out


def test_slots_become_scored_groups_of_the_prompts_that_their_indices_name() -> None:
    config = worker_config()
    task = open_task(config, TOKENIZER)
    reward = lambda question, text: SCORED if text == question.ground_truth else 0.0  # noqa: E731
    batches, reports, _, _ = rolled_out(config, EchoEngine(), reward, steps=3)
    for version, batch in enumerate(batches):
        assert [group.group_id for group in batch.groups] == list(range(4 * version, 4 * version + 4))
        for group in batch.groups:
            assert group.start_version == version and group.worker == "rollout/0"
            prompt = task.prompt(group.prompt_index)
            assert np.array_equal(group.prompt_tokens, prompt.tokens)
            assert len(group.rows) == 3 and group.duration_s > 0
            for row in group.rows:
                expected = (prompt.question.ground_truth + "<eos>") if len(prompt.question.ground_truth) < 8 else None
                if expected:
                    assert TOKENIZER.decode(row.tokens) == expected
                    assert row.reward == SCORED
                assert row.mask.all() and len(row.mask) == len(row.tokens)
    values = metric_values(reports)
    assert values["rollout/groups"] >= 12
    assert values["rollout/rows"] == 3 * values["rollout/groups"]
    assert values["rollout/failed"] == 0
    assert values["rollout/epochs"] >= 12 / task.num_prompts


def test_a_failing_reward_fails_its_group_and_other_groups_fill_the_batch() -> None:
    failed: list[Question] = []

    def reward(question: Question, text: str) -> float:
        if kind_of(question) == 2:
            failed.append(question)
            raise KeyError("no unit")
        return 1.0

    batches, reports, server, _ = rolled_out(worker_config(), EchoEngine(), reward, steps=3)
    task = open_task(worker_config(), TOKENIZER)
    trained = [task.prompt(group.prompt_index).question for batch in batches for group in batch.groups]
    assert not [question for question in trained if kind_of(question) == 2]
    # The run ends as soon as its last batch is full: a reward that has just been called then is not reported any more.
    assert 2 <= server.counters()["buffer/dropped_failed"] <= len(failed)
    assert metric_values(reports)["rollout/failed"] <= len(failed)


class CountingEngine(EchoEngine):
    """Records the largest number of groups in flight, of training and of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Counter[bool] = Counter()
        self.most = {False: 0, True: 0}

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        trains = request.purpose is Purpose.TRAINING
        self.running[trains] += 1
        self.most[trains] = max(self.most[trains], self.running[trains])
        try:
            return await super().generate(request)
        finally:
            self.running[trains] -= 1


@pytest.mark.parametrize(
    ("beside_training", "pinned", "at_once"), [(True, False, 2), (True, True, 6), (False, False, 6)]
)
def test_an_evaluation_beside_training_keeps_to_max_groups_in_flight(
    beside_training: bool, pinned: bool, at_once: int
) -> None:
    config = worker_config(staleness={"max": 1})
    evaluation = {"num_prompts": 6, "every_steps": 1, "pin_version": pinned}
    config = changed(config, rollout={"max_groups_in_flight": 2}, eval=evaluation)
    engine = CountingEngine()
    rolled_out(
        config, engine, lambda question, text: 1.0,
        beside=lambda worker: worker.player.evaluate(1, beside_training=beside_training),
    )
    assert engine.most[True] == 2 and engine.most[False] == at_once


def test_evaluation_reports_accuracy_over_held_out_prompts_and_samples() -> None:
    config = worker_config(staleness={"max": 1})
    held_out = open_task(config, TOKENIZER).eval_prompts()
    accurate = [prompt.question for prompt in held_out[:4]]
    broken = held_out[5].question

    def reward(question: Question, text: str) -> float:
        if question == broken:
            raise ValueError("broken")
        return 1.0 if question in accurate else 0.5

    engine = EchoEngine()
    *_, report = rolled_out(
        config, engine, reward, beside=lambda worker: worker.player.evaluate(9, beside_training=False)
    )
    values = reduce_metrics(report.metrics)
    # Of 12 answers 8 are right, 2 half right, 2 could not be scored.
    assert values["eval/accuracy"] == pytest.approx(8 / 12)
    assert values["eval/reward"] == pytest.approx(9 / 12)
    assert (values["eval/failed"], values["eval/version"], report.version) == (2, 9, 9)
    asked = [request for request in engine.requests if request.purpose is Purpose.EVALUATION]
    assert [request.prompt.text for request in asked] == [prompt.text for prompt in held_out]
    assert {request.n for request in asked} == {2}
    assert len({request.group_id for request in asked}) == 6


def test_remax_asks_for_a_greedy_answer_to_each_prompt() -> None:
    config = worker_config(algorithm={"advantage": "remax"})
    engine = EchoEngine()
    (batch,), *_ = rolled_out(config, engine, lambda question, response: SCORED)
    greedy = [request for request in engine.requests if request.temperature < 0.01]
    assert [group.baseline_reward for group in batch.groups] == [SCORED] * 4
    assert {request.prompt.index for request in greedy} >= {group.prompt_index for group in batch.groups}
    assert all(request.n == 1 and request.purpose is Purpose.BASELINE for request in greedy)
    assert all(len(group.rows) == 3 for group in batch.groups)


def test_the_worker_ends_a_reply_at_a_stop_text_where_the_engine_samples_on() -> None:
    config = changed(worker_config(), rollout={"stop": ("b",)})
    task = open_task(config, TOKENIZER)
    prompt = replace(task.prompt(0), question=Question(messages=(), ground_truth="abcd"))

    async def play() -> list[Episode]:
        player = ScoredPlayer(config, 0, EchoEngine(), task, [plain_reward(config, lambda *_: SCORED)], TOKENIZER)
        try:
            return await player.play(request_for(0, prompt=prompt, n=1))
        finally:
            await player.aclose()

    (episode,) = asyncio.run(play())
    (row,) = episode.rows
    assert TOKENIZER.decode(row.tokens[row.mask]) == "ab" and row.finish_reason == "stop"


def test_an_engine_that_dies_ends_the_run_with_its_error() -> None:
    class DyingEngine(EchoEngine):
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            raise ProcessDiedError("rollout/0: the server ended with code -9")

    config = worker_config(timeouts={"batch_s": 1})
    with pytest.raises(ProcessDiedError, match="code -9"):
        rolled_out(config, DyingEngine(), lambda question, text: 1.0)


def test_an_engine_that_never_answers_is_named_with_the_time_waited() -> None:
    class SilentEngine(EchoEngine):
        async def generate(self, request: GenerationRequest) -> list[SampledReply]:
            await asyncio.sleep(60)
            return []

    config = worker_config(timeouts={"generate_s": 0.2, "batch_s": 1})
    with pytest.raises(WaitTimeoutError, match=r"^rollout/0 .*training-"):
        rolled_out(config, SilentEngine(), lambda question, text: 1.0)


class SlowOnceEngine(EchoEngine):
    """Never answers the first group."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        if request.group_id == 0:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.cancelled.append(request.group_id)
                raise
        return await super().generate(request)


def test_a_dropped_group_is_cancelled_at_the_engine_and_its_prompt_is_granted_again() -> None:
    config = worker_config()
    config = replace(config, staleness=StalenessConfig(max=1, on_late="drop"))
    engine = SlowOnceEngine()
    batches, _, server, _ = rolled_out(config, engine, lambda *_: SCORED, steps=4)
    assert engine.cancelled == [0]
    assert server.counters()["buffer/dropped_late"] == 1
    again = [request for request in engine.requests if request.prompt.index == 0]
    assert len(again) == 1 and again[0].group_id > 0  # its first request was never answered
    assert all(0 not in [group.group_id for group in batch.groups] for batch in batches)
