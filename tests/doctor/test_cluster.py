"""The doctor on several nodes: whether they agree, and whether they reach each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from async_rl.base.config.loading import load_config
from async_rl.cli import main
from async_rl.tools.doctor.cluster import Probe, compare
from async_rl.tools.doctor.host import Check, examine_config
from tests.kit.configs import make_config
from tests.kit.models import save_tiny_model

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.12.1", "ray": "2.60", "sglang": "0.5.21"}
GOOD = [Check("torch", "ok", "2.13.0"), Check("configuration", "ok", "a run would start")], VERSIONS


def broken(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.what: check for check in checks if check.state == "broken"}


def test_nodes_that_differ_are_listed_with_what_to_do() -> None:
    other = [Check("task", "broken", "no such file", "copy it")], VERSIONS | {"torch": "2.12.1", "sglang": "none"}
    found = broken(compare({"10.0.0.1": GOOD, "10.0.0.2": other}))
    assert found["torch everywhere"].found == "10.0.0.1 has 2.13.0; 10.0.0.2 has 2.12.1"
    assert found["10.0.0.2: task"] == Check("10.0.0.2: task", "broken", "no such file", "copy it")
    assert set(found) == {"torch everywhere", "sglang everywhere", "10.0.0.2: task"}


def test_another_host_needs_the_files_of_the_run(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    overrides = ["task.name=", f"task.path={tmp_path}/rows.jsonl", "task.reward=gsm8k", "eval.num_prompts=0"]

    def checked() -> dict[str, Check]:
        config = load_config(config_file, overrides)
        return {check.what: check for check in examine_config(config, is_driver=False)}

    assert not broken(checked().values())
    (tmp_path / "rows.jsonl").unlink()
    assert "rows.jsonl" in broken(checked().values())["configuration"].found


def test_a_node_that_cannot_answer_is_named() -> None:
    gone, bare = "no answer for 120 s", "No module named 'async_rl'"
    found = broken(compare({"10.0.0.1": GOOD, "10.0.0.2": gone, "10.0.0.3": bare}))
    assert "no answer for 120 s" in found["10.0.0.2"].found and "'async_rl'" in found["10.0.0.3"].found


def test_a_port_that_nobody_serves_is_reported_with_the_reason() -> None:
    probe = Probe(os.getcwd(), make_config())
    address, port = probe.listen()
    with socket.create_server((address, 0)) as closed:
        shut = closed.getsockname()[1]
    (missed,) = probe.reach([(address, port), (address, shut)])
    assert missed.startswith(f"{address}:{shut} (") and "refused" in missed


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    tree = {
        "run": {"dir": str(tmp_path / "runs")}, "model": {"path": str(tmp_path / "model")},
        "task": {"name": "reasoning_gym/spell_backward", "max_prompt_tokens": 64},
        "rollout": {"engine": "hf", "max_response_tokens": 8}, "placement": {"rollout": {"nodes": 1}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "config.yaml"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two Ray nodes on this host; the second finds another version of transformers."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    other = tmp_path / "other" / "transformers-1.2.3.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
    path = os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster()
    cluster.add_node(num_cpus=2, include_dashboard=False)
    cluster.add_node(num_cpus=2, env_vars={"PYTHONPATH": path})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.nightly
@pytest.mark.e2e
def test_the_doctor_examines_every_node_of_a_ray_cluster_and_the_network_between(
    config_file: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(config_file)]) == 1
    text = capsys.readouterr().out
    table = {line[8:].split("  ")[0]: line for line in text.splitlines() if line.startswith(("ok", "warn", "broken"))}
    assert [what for what, line in table.items() if line.startswith("broken")] == ["transformers everywhere"]
    assert "1.2.3" in table["transformers everywhere"]
    assert table["placement"].startswith("ok") and table["ports"].startswith("ok")
    assert text.count(" checks are ok") == 2, "each node has examined itself"


@pytest.mark.e2e
def test_without_a_cluster_the_doctor_says_how_to_start_one(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # the file with the address of the last cluster is elsewhere
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", cache(set))  # nor are the Rays of other tests
    assert main(["doctor", str(config_file)]) == 1
    assert "ray start --head" in capsys.readouterr().out
