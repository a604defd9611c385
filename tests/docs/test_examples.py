"""The files that people copy: the shell can read the scripts, Kubernetes the manifest, and they name what there is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.base.config.loading import load_config

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
    text = (SCRIPTS / "kuberay.yaml").read_text()
    claim, job = yaml.safe_load_all(text)
    assert (claim["kind"], job["apiVersion"], job["kind"]) == ("PersistentVolumeClaim", "ray.io/v1", "RayJob")
    program, command, config, *words = job["spec"]["entrypoint"].split()
    assert (program, command) == ("async-rl", "train")
    assert f"kubectl create configmap async-rl --from-file=configs/{Path(config).name}\n" in text
    settings = [word for word in words if "=" in word]
    assert [word for word in words if word not in settings] == ["--resume", "auto"]
    placement = load_config(ROOT / "configs" / Path(config).name, settings).placement
    cluster = job["spec"]["rayClusterSpec"]
    groups: list[dict[str, Any]] = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert sum(group.get("replicas", 1) for group in groups) == placement.num_nodes
    for group, name in zip(groups, ("learner", "rollout"), strict=True):
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {name: 1}
        assert getattr(placement, name).resource == name
        assert group["rayStartParams"]["num-gpus"] == "8"
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == placement.learner.gpus_per_node
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert ("/runs" in mounts.values(), "/config" in mounts.values()) == (name == "learner",) * 2
    assert {claim["metadata"]["name"]} == {
        volume["persistentVolumeClaim"]["claimName"] for group in groups
        for volume in group["template"]["spec"]["volumes"] if "persistentVolumeClaim" in volume
    }
