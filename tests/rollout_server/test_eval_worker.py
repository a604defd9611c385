"""The worker of an evaluation server, and the parts into which several such servers split an evaluation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import Config
from async_rl.base.messages.reports import EvaluationDone, WorkerReport
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.engines.base import Purpose
from rollout_server.question import Question
from rollout_server.tasks.base import open_task
from rollout_server.worker.evaluation import version_metrics
from rollout_server.worker.worker import EvalWorker, ScoredPlayer
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.worker import plain_reward


def with_eval_server(config: Config) -> Config:
    return changed(config, eval={"every_steps": 1}, placement={"eval": {"servers": 1}})


def reward(question: Question, text: str) -> float:
    return float(sum(map(ord, question.ground_truth)) % 3 == 0)


def evaluated(config: Config, parts: list[tuple[int, int]]) -> tuple[list[EvaluationDone], list[WorkerReport], Any]:
    """Run an evaluation server with EchoEngine; returns the results of the parts, its reports, and its engine."""

    async def run() -> tuple[list[EvaluationDone], list[WorkerReport], Any]:
        engine = EchoEngine()
        await engine.start()
        task = open_task(config, TOKENIZER)
        worker = EvalWorker(config, ScoredPlayer(config, 1, engine, task, [plain_reward(config, reward)], TOKENIZER))
        assert worker.status().doing == "waits for a version to evaluate" and worker.status().limit_s == 0
        reports: list[WorkerReport] = []

        async def collect() -> None:
            async for report in worker.run():
                reports.append(report)

        collecting = asyncio.create_task(collect())
        results = [await worker.player.evaluate(3, beside_training=False, part=part) for part in parts]
        while not reports:
            await asyncio.sleep(0.01)
        await worker.stop()
        await asyncio.wait_for(collecting, 10)
        return results, reports, engine

    return asyncio.run(run())


def test_the_parts_of_an_evaluation_have_the_prompts_seeds_and_metrics_of_the_whole() -> None:
    config = with_eval_server(worker_config())
    (whole,), _, engine = evaluated(config, [(0, 1)])
    parts, _, split = evaluated(config, [(0, 4), (1, 4), (2, 4), (3, 4)])
    values = reduce_metrics(whole.metrics)
    assert 0 < values["eval/accuracy"] < 1 and values["eval/version"] == 3
    assert reduce_metrics(metric for part in parts for metric in part.metrics) == pytest.approx(values)
    assert {each for part in parts for each in part.answers} == set(whole.answers) and len(whole.answers) == 6
    assert {each.reward for each in whole.answers} == {0.0, 1.0} and all(each.answer for each in whole.answers)

    def asked(requests: Any) -> list[tuple[str, int, int, int]]:
        return sorted((r.prompt.text, r.prompt.index, r.seed, r.n) for r in requests)

    assert asked(split.requests) == asked(engine.requests) and len(engine.requests) == 6
    assert {request.purpose for request in split.requests} == {Purpose.EVALUATION}


def test_the_versions_of_an_evaluation_are_those_of_all_its_tokens_in_any_parts() -> None:
    """Six tokens of versions 3, 3, 5 and 4, 6, 6: from 3 to 6, 4.5 on average."""
    answers = [np.array([3, 3, 5]), np.array([4]), np.array([6, 6])]
    expected = {"eval/oldest_version": 3.0, "eval/newest_version": 6.0, "eval/mean_version": 4.5}
    assert reduce_metrics(version_metrics(answers)) == expected
    assert reduce_metrics([*version_metrics(answers[:1]), *version_metrics(answers[1:])]) == pytest.approx(expected)
