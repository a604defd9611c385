"""Commands with models and data sets that are named on a hub: a small server, and huggingface_hub's own client."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.base.config.loading import load_config
from async_rl.cli import main
from benchmarks.marked_command import MarkedCommand
from tests.kit.hub import HubServer, open_hub
from tests.kit.models import load_model, save_tiny_model

MODEL, DATA = "Qwen/Qwen9-tiny", "some/sums"


def sums(*numbers: int) -> bytes:
    rows = ({"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with a model and data, and the file config.yaml of a run on both in the working directory."""
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    tree = {
        "run": {"name": "named", "dir": str(tmp_path / "runs"), "steps": 2}, "model": {"path": MODEL},
        "task": {"path": f"hf://{DATA}:train", "eval_path": f"hf://{DATA}:test"}, "staleness": {"max": 1},
        "rollout": {"engine": "hf", "group_size": 2, "max_response_tokens": 8},
        "learner": {"prompts_per_step": 4, "lr": 1e-3, "max_tokens_per_microbatch": 2048},
        "algorithm": {"filter_zero_variance": False}, "eval": {"num_prompts": 2}, "logging": {"wandb": "disabled"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with open_hub() as hub:
        hub.add_model(MODEL, tmp_path / "model")
        hub.add_dataset(DATA, {"train.jsonl": sums(*range(20)), "test.jsonl": sums(8, 9)})
        hub.use(monkeypatch, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.mark.processes  # it computes for long
def test_fine_tuning_starts_from_a_model_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    steps = ["sft.steps=1", "sft.batch_size=2"]
    assert main(["sft", "config.yaml", f"sft.base={MODEL}@main", "model.path=runs/new", *steps]) == 0
    recorded = load_config(tmp_path / "runs" / "new" / "sft_config.yaml").sft.base
    assert recorded == f"hf://{MODEL}@{hub.models[MODEL].branches['main']}"
    assert main(["sft", "config.yaml", f"model.path=hf://{MODEL}", *steps]) == 2


@pytest.mark.processes  # it computes for long
def test_a_model_of_the_hub_is_evaluated(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", MODEL, "config.yaml"]) == 0
    assert "eval/accuracy" in capsys.readouterr().out
    assert main(["eval", MODEL]) == 2
    assert "needs a CONFIG" in capsys.readouterr().err


def command(hub: HubServer, folder: Path, *words: str) -> str:
    """Run a command in a process of its own; returns its output."""
    environment = {**os.environ, **hub.environment(folder / "cache"), "HF_TOKEN": hub.TOKEN}
    command = MarkedCommand(list(words), folder / "command.log", environment=environment)
    try:
        assert command.wait(240.0) == 0, command.text()[-3000:]
    finally:
        command.kill()
    return command.text()


def settings(run_dir: Path) -> Any:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_run_resumes_from_the_commits_it_began_with_and_without_the_hub(hub: HubServer, tmp_path: Path) -> None:
    run_dir, commit = tmp_path / "runs" / "named", hub.models[MODEL].branches["main"]
    said = command(
        hub, tmp_path, "train", str(tmp_path / "config.yaml"), "checkpoint.every_steps=2", "algorithm.kl.kind=k2_loss",
        "checkpoint.push_to_hub=me/trained", "placement.learner.ranks=2", "placement.rollout.servers=2",
        f"reference.path={MODEL}",
    )
    assert f"{run_dir / 'model'} is on the hub as me/trained" in said
    trained = hub.models["me/trained"]
    assert trained.is_private and trained.commits[trained.branches["main"]] == {
        str(file.relative_to(run_dir / "model")): file.read_bytes()
        for file in (run_dir / "model").rglob("*") if file.is_file()
    }
    assert hub.downloads and set(hub.downloads.values()) == {1}  # by any of the processes
    assert settings(run_dir)["model"]["path"] == settings(run_dir)["reference"]["path"] == f"hf://{MODEL}@{commit}"
    assert settings(run_dir)["task"]["path"] == f"hf://{DATA}@{hub.datasets[DATA].branches['main']}:train"

    hub.models[MODEL].commit({"config.json": b"another model"})
    hub.close()
    command(hub, tmp_path, "train", "--resume", str(run_dir), "run.steps=3", "checkpoint.push_to_hub=")
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    command(hub, tmp_path, "export", str(run_dir), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "tokenizer.json").is_file() and load_model(tmp_path / "exported")
    command(hub, tmp_path, "export-trajectories", str(run_dir), str(tmp_path / "rows.parquet"), "--text")
