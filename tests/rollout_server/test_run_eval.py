from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml

from async_rl.cli import main
from async_rl.config import EvalConfig
from async_rl.telemetry.metrics import reduce_metrics
from rollout_server.run_eval import _at_k_metrics, _source_metrics, _version_metrics, pass_at_k
from tests.kit.models import save_tiny_model


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 4, 2), (1, 4, 2), (3, 4, 2), (2, 5, 3), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(correct: int, samples: int, k: int) -> None:
    answers = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(answers, k))
    assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_evaluation_of_several_answers_reports_avg_and_pass_at_k() -> None:
    rewards = [[1.0, 0.2, 0.0, 1.0, 0.0], [0.0, None, 0.0, 0.0, 0.0]]
    values = reduce_metrics(_at_k_metrics(rewards, EvalConfig(samples=5)))
    assert values == pytest.approx(
        {"eval/avg_at_5": 0.2, "eval/pass_at_2": 0.35, "eval/pass_at_4": 0.5, "eval/pass_at_5": 0.5}
    )
    assert list(_at_k_metrics([[1.0]], EvalConfig())) == []


def test_accuracy_is_reported_by_source_where_there_are_several() -> None:
    rewards = [[1.0, 0.2], [0.0, 1.0], [None, 1.0], [1.0, 1.0]]
    assert reduce_metrics(_source_metrics(["gsm8k", "math", "math", "gsm8k"], rewards, {"gsm8k", "math"})) == {
        "eval/accuracy/gsm8k": 0.75, "eval/accuracy/math": 0.5
    }
    assert list(_source_metrics(["gsm8k"] * 4, rewards, {"gsm8k"})) == []
    part = reduce_metrics(_source_metrics(["gsm8k"] * 4, rewards, {"gsm8k", "math"}))
    assert part == {"eval/accuracy/gsm8k": 0.625}, "other parts have the other source"


def test_an_evaluation_reports_which_versions_sampled_its_answers() -> None:
    versions = [np.array([3, 3, 4], np.int32), np.array([5], np.int32)]
    assert reduce_metrics(_version_metrics(versions)) == {"eval/oldest_version": 3, "eval/newest_version": 5}


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
    assert main(["eval", str(tmp_path / "model"), "eval.size=4", "eval.samples=2"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eval/"))
    assert float(lines["eval/accuracy"]) == float(lines["eval/avg_at_2"])
    assert {key.removeprefix("eval/") for key in lines} == {
        "accuracy", "reward", "response_length", "failed", "oldest_version", "newest_version", "avg_at_2", "pass_at_2"
    }
    capsys.readouterr()
    (tmp_path / "config.yaml").unlink()
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert f"needs a CONFIG with the task: there is no {tmp_path}/config.yaml" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert f"got {tmp_path}/nowhere: there is no such folder" in capsys.readouterr().err
