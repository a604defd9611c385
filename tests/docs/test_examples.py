"""The files that people copy: the shell can read the scripts, Kubernetes the manifest, and they name what there is."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.loading import load_config

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.mark.parametrize("script", [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.slurm")], ids=lambda script: script.name)
def test_a_script_is_valid_shell(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=10)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_slurm_script_asks_for_the_nodes_and_gpus_that_its_config_places() -> None:
    text = (SCRIPTS / "two_nodes.slurm").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE))
    (config,) = re.findall(r"\$\{1:-(\S+)\}", text)
    placement = load_config(ROOT / config, []).placement
    assert int(asked["nodes"]) == placement.num_nodes
    assert int(asked["gpus-per-node"]) == placement.learner.gpus_per_node
    assert text.index("async-rl doctor") < text.index("async-rl train")


def test_the_kuberay_manifest_asks_for_the_nodes_and_gpus_that_its_config_places() -> None:
    (job,) = yaml.safe_load_all((SCRIPTS / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    (config,) = re.findall(r"async-rl train /shared/(\S+)", job["spec"]["entrypoint"])
    placement = load_config(ROOT / "configs" / config, []).placement
    cluster = job["spec"]["rayClusterSpec"]
    groups: list[dict[str, Any]] = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert sum(group.get("replicas", 1) for group in groups) == placement.num_nodes
    for group, name in zip(groups, ("learner", "rollout"), strict=True):
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {name: 1}
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == placement.learner.gpus_per_node
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_dockerfile_makes_the_image_of_the_manifest_from_files_that_exist() -> None:
    """Its folders are the packages of the wheel, its extras those of pyproject.toml, its CUDA that of torch."""
    text = (SCRIPTS / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (job,) = yaml.safe_load_all((SCRIPTS / "kuberay.yaml").read_text())
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert f"docker build -f scripts/Dockerfile -t {container['image']} ." in text
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]} <= copied
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    (constraints,) = re.findall(r"--constraint (\S+)", text)
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", (ROOT / constraints).read_text(), re.MULTILINE)
    assert f"FROM nvidia/cuda:{runtime}." in text
