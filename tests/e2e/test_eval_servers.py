"""Runs with an evaluation server: its results are those of one version, and training waits for none of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.pipeline import run
from benchmarks.marked_command import MarkedCommand, wait_until
from learner.models.export import export
from rollout_server.question import Question
from rollout_server.worker.eval_command import evaluate_model
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

def parity(question: Question, response: str) -> float:
    """1 or 0 by every character of the answer, so that one other token shows in half of the answers."""
    return float(sum(map(ord, response)) % 2)


def evaluated_alone(config: Config, version: int, folder: Path) -> dict[str, float]:
    """Return what `async-rl eval` measures with the model of a checkpoint."""
    export(checkpoint_folder(config.run_dir, version), folder / f"model-{version}")
    model = dataclasses.replace(config.model, path=str(folder / f"model-{version}"))
    return asyncio.run(evaluate_model(dataclasses.replace(config, model=model)))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "servers", "ranks", "ema_decay"),
    [("hf", 2, 2, 0.8), ("sglang", 1, 1, 0.0)],
)
def test_evaluation_servers_measure_what_async_rl_eval_does_beside_training(
    smoke_yaml: Path, tmp_path: Path, engine: str, servers: int, ranks: int, ema_decay: float
) -> None:
    """With a moving average of the weights it is this that they are served, and that `async-rl export` writes."""
    config = load_config(smoke_yaml, [
        f"run.dir={tmp_path}", "run.name=apart", f"rollout.engine={engine}", "staleness.max=2",
        f"task.reward={__name__}:parity", f"placement.eval.servers={servers}", "eval.every_steps=2",
        "eval.num_prompts=25", "eval.samples_per_prompt=4", "learner.lr=1e-2", "checkpoint.every_steps=2",
        "checkpoint.keep_last=9", "run.steps=6", f"placement.learner.ranks={ranks}",
        f"learner.ema_decay={ema_decay}",
    ])  # fmt: skip
    summary = run(config)
    assert summary["steps"] == 6 and summary["staleness_max"] <= 2
    evaluated = {record["step"]: record for record in logged(config.run_dir) if "eval/accuracy" in record}
    assert {0, 6} <= evaluated.keys() <= {0, 2, 4, 6}
    for version, record in evaluated.items():
        assert (record["eval/oldest_version"], record["eval/newest_version"]) == (version, version)
        if version in (2, 4) or (version == 6 and engine == "hf"):
            alone = evaluated_alone(config, version, tmp_path)
            if engine == "hf":
                keys = ("eval/accuracy", "eval/response_length", "eval/pass_at_2")
                assert [record[key] for key in keys] == pytest.approx([alone[key] for key in keys])
            else:  # SGLang's samples depend on how it batches: 100 answers, half of them right
                assert abs(record["eval/accuracy"] - alone["eval/accuracy"]) < 0.3
    skipped = summary.get("skipped_evaluations", 0)
    assert len(evaluated) + skipped == 4
    pools = summary["pools"]
    own = {f"eval/{number}" for number in range(servers)}
    assert set(pools) == {*(f"learner/{rank}" for rank in range(ranks)), "rollout/0", *own}
    assert pools["learner/0"]["eval"] == pools["rollout/0"]["eval"] == 0 < min(pools[name]["busy"] for name in own)
    steps = [record for record in logged(config.run_dir) if "staleness/max" in record]
    pushed = {record["step"] for record in steps if "time/eval_push_s" in record}
    assert pushed == evaluated.keys() - {0, 6} and not any("time/held_by_eval_s" in record for record in steps)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_goes_on_and_says_so_when_its_evaluation_server_is_killed(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=killed", "run.steps=1000000", "staleness.max=2",
        "rollout.engine=hf", "placement.eval.servers=1", "eval.every_steps=1", "eval.num_prompts=400",
        "eval.samples_per_prompt=16",
        "rollout.max_response_tokens=40",
    )
    run_dir = tmp_path / "killed"
    wait_until(lambda: len(logged(run_dir)) > 2 or command.process.poll() is not None, 300, "two steps")
    assert "eval/accuracy" not in (run_dir / "metrics.jsonl").read_text(), "the evaluation of version 0 still runs"
    command.wait_for("ray::EvalActor")[0].send_signal(signal.SIGKILL)
    steps = len(logged(run_dir))
    wait_until(lambda: "eval/0 is back" in command.text(), 120, "the evaluation server")
    wait_until(lambda: len(logged(run_dir)) > steps + 3, 120, "more steps")
    wait_until(lambda: any("time/eval_push_s" in r for r in logged(run_dir)[steps:]), 120, "another evaluation")
    command.interrupt()
    assert command.wait(120) == 130 and not command.orphans()
    text = command.text()
    assert re.search(r"eval/0 is lost, and started again: eval/0 on \S+ died", text)
    assert "version 0 is not evaluated" in text
    assert "rollout/0 is lost" not in text
    assert json.loads((run_dir / "summary.json").read_text())["skipped_evaluations"] >= 1
