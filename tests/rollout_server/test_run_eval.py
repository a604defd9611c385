from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from async_rl.base.config import Config, EvalConfig, Sampling
from async_rl.base.errors import RewardError
from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.base.types import Prompt
from async_rl.cli import main
from rollout_server.engines.base import GenerationRequest
from rollout_server.episodes.episode import Episode, WholeRow
from rollout_server.tasks.base import open_task
from rollout_server.worker.evaluation import (
    Evaluation,
    GoldRewards,
    at_k_metrics,
    pass_at_k,
    reward_metrics,
    source_metrics,
)
from rollout_server.worker.worker_stats import WorkerStats
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER
from tests.kit.models import save_tiny_model


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 4, 2), (1, 4, 2), (3, 4, 2), (2, 5, 3), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(correct: int, samples: int, k: int) -> None:
    answers = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(answers, k))
    assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_evaluation_of_several_answers_reports_avg_and_pass_at_k() -> None:
    rewards = [[1.0, 0.2, 0.0, 1.0, 0.0], [0.0, None, 0.0, 0.0, 0.0]]
    values = reduce_metrics(at_k_metrics(rewards, EvalConfig(samples_per_prompt=5)))
    assert values == pytest.approx(
        {"eval/avg_at_5": 0.2, "eval/pass_at_2": 0.35, "eval/pass_at_4": 0.5, "eval/pass_at_5": 0.5}
    )
    assert list(at_k_metrics([[1.0]], EvalConfig())) == []


def test_accuracy_is_reported_by_source_where_there_are_several() -> None:
    rewards = [[1.0, 0.2], [0.0, 1.0], [None, 1.0], [1.0, 1.0]]
    one_is_right, sources = EvalConfig(), ["gsm8k", "math", "math", "gsm8k"]
    assert reduce_metrics(source_metrics(sources, rewards, {"gsm8k", "math"}, one_is_right)) == {
        "eval/accuracy/gsm8k": 0.75, "eval/reward_on/gsm8k": 0.8,
        "eval/accuracy/math": 0.5, "eval/reward_on/math": 0.5,  # a reward that failed is 0
    }
    assert list(source_metrics(["gsm8k"] * 4, rewards, {"gsm8k"}, one_is_right)) == []
    part = reduce_metrics(source_metrics(["gsm8k"] * 4, rewards, {"gsm8k", "math"}, one_is_right))
    assert set(part) == {"eval/accuracy/gsm8k", "eval/reward_on/gsm8k"}, "other parts have the other source"
    assert part["eval/accuracy/gsm8k"] == 0.625


@given(
    answers=st.lists(st.none() | st.floats(-1, 3), min_size=1, max_size=9), correct_threshold=st.floats(0, 2),
)
def test_accuracy_and_the_means_of_right_and_wrong_answers_give_the_mean_reward(
    answers: list[float | None], correct_threshold: float
) -> None:
    evaluation = EvalConfig(correct_threshold=correct_threshold)
    means = reduce_metrics(reward_metrics(answers, evaluation))
    accuracy = sum(answer is not None and answer >= correct_threshold - 1e-6 for answer in answers) / len(answers)
    told = accuracy * means.get("eval/reward_of_right", 0) + (1 - accuracy) * means.get("eval/reward_of_wrong", 0)
    assert told == pytest.approx(sum(answer or 0 for answer in answers) / len(answers))


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, Sampling(1.5, 0.9, 40, 0.1)),
        ({"temperature": 0.6, "top_p": 0.5}, Sampling(0.6, 0.5, 40, 0.1)),
        ({"top_k": 0, "min_p": 0.0}, Sampling(1.5, 0.9)),
        ({"temperature": 0, "samples_per_prompt": 1}, Sampling(1e-4)),
    ],
)
def test_held_out_prompts_are_answered_by_sampling_of_their_own(settings: dict[str, float], asked: Sampling) -> None:
    training = {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}
    config = changed(worker_config(), rollout=training, eval=settings)
    requests = []

    async def answer(request: GenerationRequest) -> list[Episode]:
        requests.append(request)
        raise RewardError("none")

    evaluation = Evaluation(config, answer, open_task(config, TOKENIZER), WorkerStats("rollout/0"))
    asyncio.run(evaluation.run(0, beside_training=False))
    assert {request.sampling for request in requests} == {asked}
    assert not any(request.wants_support for request in requests)


ROW = WholeRow(
    tokens=np.array([5, 6]), logprobs=np.array([0.0, -1.0]), versions=np.zeros(2, np.int32),
    mask=np.array([False, True]), num_start_tokens=1, turn_ends=(1,), turn_rewards=(0.0,), finish_reason="stop",
)  # fmt: skip


def evaluated(config: Config, gold: GoldRewards | None) -> dict[str, float]:
    """The metrics of an evaluation whose answers have the rewards 1, 0, 3 and 2."""
    rewards = itertools.cycle([1.0, 0.0, 3.0, 2.0])

    async def answer(request: GenerationRequest) -> list[Episode]:
        return [Episode(rows=(ROW,), answer="x", end="done").with_reward(next(rewards), {}) for _ in range(request.n)]

    evaluation = Evaluation(config, answer, open_task(config, TOKENIZER), WorkerStats("rollout/0"), gold)
    return reduce_metrics(asyncio.run(evaluation.run(0, beside_training=False)).metrics)


def test_gold_rewards_are_reported_with_their_moments() -> None:
    gold = iter([0.0, 1.0, 2.0, None])

    async def score(prompt: Prompt, episodes: Sequence[Episode]) -> list[float | None]:
        return [next(gold) for _ in episodes]

    found = evaluated(changed(worker_config(), eval={"num_prompts": 2, "samples_per_prompt": 2}), score)
    assert {key: value for key, value in found.items() if "gold" in key} == pytest.approx({
        "eval/gold": 1.0, "eval/gold_squared": 5 / 3, "eval/gold_labels": 3.0, "eval/gold_no_verdict": 1.0,
    })  # fmt: skip


def test_the_eval_command_prints_a_table_with_the_config_of_the_models_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    config = {
        "model": {"path": "elsewhere"},
        "task": {"name": "reasoning_gym/spell_backward", "params": {"max_word_len": 5}, "max_prompt_tokens": 80},
        "rollout": {"engine": "hf", "max_response_tokens": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["eval", str(tmp_path / "model"), "eval.num_prompts=4", "eval.samples_per_prompt=2"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eval/"))
    assert float(lines["eval/accuracy"]) == float(lines["eval/avg_at_2"])
    (tmp_path / "config.yaml").unlink()
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert f"{tmp_path}/config.yaml" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path}/nowhere" in capsys.readouterr().err
