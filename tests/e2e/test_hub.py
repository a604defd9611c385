"""Whole runs of models and data sets that are named on a hub: a small server, and huggingface_hub's own client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from benchmarks.marked_command import MarkedCommand
from tests.kit.hub import HubServer, open_hub
from tests.kit.models import load_model, save_tiny_model
from tests.kit.runs import logged
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.e2e

MODEL, DATA = "Qwen/Qwen9-tiny", "some/sums"
LIMIT_S = 240.0


def sums(*numbers: int) -> bytes:
    rows = ({"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    with open_hub() as hub:
        hub.add_model(MODEL, tmp_path / "model")
        hub.add_dataset(DATA, {"train.jsonl": sums(*range(20)), "test.jsonl": sums(8, 9)})
        yield hub


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    tree = {
        "run": {"name": "named", "dir": str(tmp_path / "runs"), "steps": 2}, "model": {"path": MODEL},
        "task": {"path": f"hf://{DATA}:train", "eval_path": f"hf://{DATA}:test"}, "staleness": {"max": 1},
        "rollout": {"engine": "hf", "group_size": 2, "max_response_tokens": 8},
        "learner": {"prompts_per_step": 4, "lr": 1e-3, "max_tokens_per_microbatch": 2048},
        "algorithm": {"filter_zero_variance": False}, "eval": {"num_prompts": 2}, "logging": {"wandb": "disabled"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "config.yaml"


@pytest.fixture
def command(hub: HubServer, tmp_path: Path) -> Iterator[Callable[..., str]]:
    commands: list[MarkedCommand] = []

    def run(*words: str) -> str:
        log = tmp_path / f"command-{len(commands)}.log"
        environment = {**hub.environment(tmp_path / "cache"), "HF_TOKEN": hub.TOKEN}
        commands.append(MarkedCommand(list(words), log, environment=environment))
        assert commands[-1].wait(LIMIT_S) == 0, commands[-1].text()[-3000:]
        return commands[-1].text()

    yield run
    for each in commands:
        each.kill()


def settings(run_dir: Path) -> Any:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.nightly
def test_a_run_resumes_from_the_commits_it_began_with_and_without_the_hub(
    hub: HubServer, config_file: Path, tmp_path: Path, command: Callable[..., str]
) -> None:
    two = ["placement.learner.ranks=2", "placement.rollout.servers=2", "reference.path=" + MODEL]
    uploads = "checkpoint.push_to_hub=me/trained"
    said = command("train", str(config_file), "checkpoint.every_steps=2", "algorithm.kl.kind=k2_loss", uploads, *two)
    assert f"{tmp_path / 'runs' / 'named' / 'model'} is on the hub as me/trained" in said
    trained = hub.models["me/trained"]
    assert trained.is_private and trained.commits[trained.branches["main"]] == {
        str(file.relative_to(model)): file.read_bytes()
        for model in [tmp_path / "runs" / "named" / "model"] for file in model.rglob("*") if file.is_file()
    }
    assert hub.downloads and set(hub.downloads.values()) == {1}  # by any of the processes
    run_dir, commit = tmp_path / "runs" / "named", hub.models[MODEL].branches["main"]
    assert settings(run_dir)["model"]["path"] == settings(run_dir)["reference"]["path"] == f"hf://{MODEL}@{commit}"
    assert settings(run_dir)["task"]["path"] == f"hf://{DATA}@{hub.datasets[DATA].branches['main']}:train"

    hub.models[MODEL].commit({"config.json": b"another model"})
    hub.close()
    command("train", "--resume", str(run_dir), "run.steps=3", "checkpoint.push_to_hub=")
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    command("export", str(run_dir), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "tokenizer.json").is_file() and load_model(tmp_path / "exported")
    command("export-trajectories", str(run_dir), str(tmp_path / "rows.parquet"), "--text")


@pytest.mark.nightly
def test_sglang_serves_a_model_of_the_hub(
    hub: HubServer, config_file: Path, tmp_path: Path, command: Callable[..., str]
) -> None:
    command("train", str(config_file), "rollout.engine=sglang", "staleness.max=0")
    assert set(hub.downloads.values()) == {1}
    records = [record for record in logged(tmp_path / "runs" / "named") if "staleness/max" in record]
    assert len(records) == 2 and all(record["parity/precision/mean_abs"] < 1e-4 for record in records)


@pytest.fixture
def other_cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two Ray nodes, of which the second has a cache of its own, as another host would have."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    common = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "RAY_worker_niceness": "0"}
    first, second = (hub.environment(tmp_path / name) for name in ("cache", "other"))
    cluster.add_node(num_cpus=2, include_dashboard=False, env_vars={**common, **first}, resources={"learner": 1})
    cluster.add_node(num_cpus=2, env_vars={**common, **second}, resources={"rollout": 1})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield tmp_path / "other"
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.nightly
def test_each_of_two_hosts_fetches_what_its_processes_need_once(
    hub: HubServer, config_file: Path, other_cache: Path, command: Callable[..., str]
) -> None:
    printed = command(
        "train", str(config_file), "placement.rollout.nodes=1", "placement.rollout.servers=2",
        "placement.learner.resource=learner", "placement.rollout.resource=rollout",
    )
    assert f"every host fetches hf://{MODEL}@" in printed
    assert set(hub.downloads.values()) == {2}
    assert list(other_cache.rglob("model.safetensors")) and list(other_cache.rglob("train.jsonl"))


@pytest.mark.nightly
def test_a_mixture_of_experts_of_the_hub_has_its_experts_recorded(
    hub: HubServer, config_file: Path, tmp_path: Path, command: Callable[..., str]
) -> None:
    hub.add_model("some/experts", save_moe(tmp_path / "experts"))
    command("train", str(config_file), "model.path=some/experts")
    records = [record for record in logged(tmp_path / "runs" / "named") if "staleness/max" in record]
    assert len(records) == 2 and all("routing/changed_fraction" in record for record in records)
