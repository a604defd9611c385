"""Benchmarks by name: their questions, their rules, and the intervals of their accuracies."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config, load_config, read_yaml
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import pinned
from async_rl.base.telemetry.metrics import accuracy_intervals, reduce_metrics, with_intervals
from async_rl.base.types import Prompt
from async_rl.cli import main
from rollout_server.tasks.base import open_task
from rollout_server.tasks.suites import suite_prompts
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER, TalkingEngine
from tests.kit.hub import HubServer, open_hub
from tests.kit.models import save_tiny_model
from tests.kit.worker import evaluated, plain_reward

GSM8K = [{"question": f"{n}+1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(4)]
MATH = [{"problem": f"half of {n}?", "solution": "", "answer": f"\\frac{{{n}}}{{2}}", "level": 1} for n in (1, 3)]
AIME = [{"id": "0", "problem": "three?", "answer": "3"}]
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n---\n"
ALL = ["gsm8k", "math500", "aime25"]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with open_hub() as hub:
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K), file)
        files = {"README.md": CARD.encode(), "main/test-00000-of-00001.parquet": file.getvalue()}
        hub.add_dataset("openai/gsm8k", files)
        hub.add_dataset("HuggingFaceH4/MATH-500", {"test.jsonl": jsonl(MATH)})
        hub.add_dataset("math-ai/aime25", {"test.jsonl": jsonl(AIME)})
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def config_of(suite: list[Any], **sections: Any) -> Config:
    evaluation = {"suite": suite, **sections.pop("eval", {})}
    return worker_config(timeouts={"reward_s": 120}, eval=evaluation, task={"max_prompt_tokens": 200}, **sections)


def prompts_of(config: Config) -> list[Prompt]:
    return suite_prompts(config, open_task(config, TOKENIZER))


def measured(config: Config, answers: dict[str, str]) -> dict[str, float]:
    """Evaluate an engine that gives a question the answer for its first words, but every second time another one."""

    def say(text: str, index: int, n: int) -> str:
        answer = next(answer for question, answer in answers.items() if text.startswith(question))
        return answer if index % 2 == 0 else "no idea"

    values, _ = evaluated(config, TalkingEngine(say), [plain_reward(config, lambda *_: 0.0)])
    return with_intervals(values)


def test_benchmarks_of_the_hub_are_held_out_prompts_with_their_instructions(hub: HubServer) -> None:
    config = pinned(config_of(ALL))
    commits = [hub.datasets[name].branches["main"] for name in ("openai/gsm8k", "HuggingFaceH4/MATH-500")]
    assert all(commit in each.path for commit, each in zip(commits, config.eval.suite, strict=False))
    assert load_config(read_yaml(dump_config(config))[0]) == config
    prompts = prompts_of(config)
    assert [prompt.source for prompt in prompts] == ["gsm8k"] * 4 + ["math500"] * 2 + ["aime25"]
    assert [prompt.question.ground_truth for prompt in prompts[3:]] == ["4", "\\frac{1}{2}", "\\frac{3}{2}", "3"]
    for prompt in prompts:
        asked = prompt.question.messages[-1]["content"]
        assert ("####" in asked) == (prompt.source == "gsm8k") and ("\\boxed" in asked) == (prompt.source != "gsm8k")
    assert all(prompt.is_held_out for prompt in prompts)


@pytest.mark.processes
def test_each_benchmark_is_scored_by_its_own_rule_with_avg_at_k_and_an_interval(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CHECK_TIMEOUT_S", "ANSWER_TIMEOUT_S"):  # a busy host imports math-verify slowly
        monkeypatch.setattr(f"rollout_server.rewards.rules.{limit}", 120.0)
    answers = {
        "0+1?": "so 1", "1+1?": "it is #### 2", "2+1?": "4", "3+1?": "4", "half of 1?": "\\boxed{0.5}",
        "half of 3?": "\\boxed{1}", "three?": "\\boxed{3}",
    }  # fmt: skip
    config = pinned(config_of(ALL, rollout={"max_response_tokens": 40}))
    values = measured(config, answers)
    assert values["eval/accuracy/gsm8k"] == 3 / 8  # of two answers to each question one is "no idea"
    assert values["eval/accuracy/math500"] == 1 / 4 and values["eval/accuracy/aime25"] == 1 / 2
    assert values["eval/avg_at_2"] == values["eval/accuracy"] == 5 / 14
    assert values["eval/pass_at_2/gsm8k"] == 3 / 4 and values["eval/pass_at_2/aime25"] == 1
    assert values["eval/prompts"] == 7 and values["eval/prompts/gsm8k"] == 4
    # gsm8k: shares 1/2, 1/2, 0, 1/2, two right and two wrong prompts beside them
    centre = (1.5 + 2) / 8
    half = 1.96 * math.sqrt(((0.75 + 2) / 8 - centre**2) / 8)
    assert values["eval/accuracy_low/gsm8k"] == pytest.approx(centre - half)
    assert values["eval/accuracy_high/gsm8k"] == pytest.approx(centre + half)
    assert values["eval/accuracy_low"] < values["eval/accuracy"] < values["eval/accuracy_high"]


def test_an_interval_has_a_width_even_if_all_answers_are_right() -> None:
    values = {"eval/prompts": 30.0, "eval/accuracy": 1.0, "eval/accuracy_squared": 1.0}
    ends = reduce_metrics(accuracy_intervals(values))
    centre = 32 / 34
    low = centre - 1.96 * math.sqrt(centre * (1 - centre) / 34)
    assert ends == pytest.approx({"eval/accuracy_low": low, "eval/accuracy_high": 1.0})
    assert list(accuracy_intervals({"eval/accuracy": 0.5})) == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["eval.suite=[mmlu]"], "gsm8k, math500, aime25"), (["eval.suite=[gsm8k,gsm8k]"], "once"),
        (["eval.suite=[{name: gsm8k, weight: 2}]"], "weight"),
        *((["eval.suite=[gsm8k]", f"eval.correct_threshold={each}"], "eval.correct_threshold") for each in (0, 1.5)),
        (["eval.suite=[gsm8k]", "task={path: a.jsonl, eval_path: b.jsonl}"], "task.eval_path"),
        (["eval.suite=[gsm8k]", "eval.gold_reward=task", "eval.every_steps=1"], "eval.gold_reward"),
    ],
)
def test_what_can_not_be_evaluated_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["model.path=none", "task.name=reasoning_gym/spell_backward", *overrides])
    assert named in str(refused.value)


def test_a_question_that_is_too_long_is_refused_and_not_left_out(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_bytes(jsonl([*AIME, {"problem": "x" * 500, "answer": "1"}]))
    config = config_of([{"name": "aime25", "path": str(file)}])
    with pytest.raises(ConfigError, match=r"row 1 of .*task\.max_prompt_tokens"):
        prompts_of(config)
    file.write_bytes(jsonl([{"problem": "x", "answer": None}]))
    with pytest.raises(ConfigError, match="row 0"):
        prompts_of(changed(config, eval={"num_prompts": 3}))


def test_a_copy_of_a_benchmark_may_have_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_bytes(jsonl([{"problem": row["question"], "worked": {"out": row["answer"]}} for row in GSM8K]))
    columns = {"prompt": "problem", "reference": "worked.out"}
    prompts = prompts_of(config_of([{"name": "gsm8k", "path": str(file), "columns": columns}]))
    assert [prompt.question.ground_truth for prompt in prompts] == ["1", "2", "3", "4"]


@pytest.mark.processes
def test_the_command_evaluates_a_model_on_a_local_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model("tiny-qwen3", tmp_path / "model", seed=0)
    (tmp_path / "aime.jsonl").write_bytes(jsonl(AIME * 3))
    (tmp_path / "own.yaml").write_text(
        "model: {path: none}\ntask: {name: reasoning_gym/spell_backward}\n"
        "rollout: {engine: hf, max_response_tokens: 4}\nlogging: {wandb: disabled}\n"
    )
    suite, model = f"eval.suite=[{{name: aime25, path: {tmp_path}/aime.jsonl}}]", str(tmp_path / "model")
    without_task = ["rollout.engine=hf", "rollout.max_response_tokens=4"]
    for words in ([str(tmp_path / "own.yaml")], without_task):
        assert main(["eval", model, *words, suite]) == 0
        said = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert said["eval/prompts/aime25"] == "3" and float(said["eval/accuracy_high/aime25"]) < 1
    assert main(["eval", model, *without_task]) == 2
    assert "eval.suite" in capsys.readouterr().err
