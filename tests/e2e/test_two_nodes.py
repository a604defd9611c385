"""Runs on two hosts: two network namespaces of this machine, joined by a virtual cable, with a Ray node in each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "two_nodes_here.sh"


def why_not() -> str:
    """Why this machine can't have network namespaces; empty if it can."""
    probe = f"arl-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
        if made.returncode == 0:
            made = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True)
            subprocess.run(["ip", "netns", "del", probe], check=True)
    except FileNotFoundError:
        return "iproute2 (`ip`) is not installed"
    return "" if made.returncode == 0 else f"network namespaces are not permitted here: {made.stderr.strip()}"


def train_on_two_hosts(smoke_yaml: Path, tmp_path: Path, *overrides: str, not_shared: Path | None = None) -> str:
    """Run the documented command as run `two` in tmp_path; returns its output. tmp_path/link counts the traffic.

    Args:
        not_shared: a folder that the second host does not see.
    """
    names = (f"run.dir={tmp_path}", "run.name=two")
    return run_on_two_hosts(tmp_path, str(smoke_yaml), *names, "staleness.max=1", *overrides, not_shared=not_shared)


def run_on_two_hosts(
    tmp_path: Path, *arguments: str, not_shared: Path | None = None, command_has: tuple[str, ...] = (),
    python_path: Path = ROOT,
) -> str:  # fmt: skip
    if reason := why_not():
        pytest.skip(reason)
    # Other tests of this process have set loopback, which is not for two hosts.
    inherited = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    environment = inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{python_path}",
        "ASYNC_RL_LINK_STATS": str(tmp_path / "link"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **({"ASYNC_RL_NOT_SHARED": str(not_shared)} if not_shared else {}),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), "env", *command_has, sys.executable, "-m", "async_rl.cli", "train", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=pytest.mark.nightly)])
def test_learner_and_server_train_over_the_cable_without_a_shared_disk(
    smoke_yaml: Path, tmp_path: Path, engine: str
) -> None:
    """The server's host sees neither run.dir nor the model folder, so it has only what the others send."""
    shutil.copytree(smoke_yaml.parent / "model", tmp_path / "model")
    printed = train_on_two_hosts(
        smoke_yaml, tmp_path, f"rollout.engine={engine}", f"model.path={tmp_path / 'model'}", "placement.rollout.nodes=1",
        "placement.learner.resource=learner", "placement.rollout.resource=rollout", "network.ports=20000-20063",
        not_shared=tmp_path,
    )
    assert not (tmp_path / "two" / "logs" / "rollout-0.log").exists()  # it is on the other host
    assert "placed: 10.77.0.1: buffer, learner/0; 10.77.0.2: rollout/0" in printed
    run_dir = tmp_path / "two"
    assert not (run_dir / "keys").exists()  # they were for this run alone
    assert "10.77.0.2: no files of model.path" in printed and "without weights, which the learner pushes" in printed
    records = logged(run_dir)
    pushed_bytes = sum(record.get("push/bytes", 0) for record in records)
    assert pushed_bytes > 4 * 2**20
    lines = (tmp_path / "link").read_text().splitlines()
    (line,) = [line for line in lines if line.split(":")[0].strip().startswith("v")]
    counts = line.split(":")[1].split()
    received_bytes, sent_bytes = int(counts[0]), int(counts[8])
    assert sent_bytes > pushed_bytes  # the weights crossed the cable
    assert received_bytes > 4 * 16 * 12  # and the groups came back
    seconds = [record["time/push_s"] for record in records if "time/push_s" in record]
    print(f"{engine}: {pushed_bytes} bytes in {len(seconds)} pushes, {sum(seconds) / len(seconds) * 1e3:.0f} ms each")


@pytest.mark.nightly
@pytest.mark.timeout(800)
def test_a_run_on_two_hosts_resumes_on_a_new_cluster(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    train_on_two_hosts(
        smoke_yaml, tmp_path, "rollout.engine=hf", "placement.rollout.nodes=1", "checkpoint.every_steps=4",
        "placement.learner.resource=learner", "placement.rollout.resource=rollout",
    )
    run_dir = tmp_path / "two"
    printed = run_on_two_hosts(tmp_path, "--resume", str(run_dir), "run.steps=6")
    assert "placed: 10.77.0.1: buffer, learner/0; 10.77.0.2: rollout/0" in printed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["resumes"]) == (6, 1)
    assert summary["buffer"]["buffer/unaccounted"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_learner_of_two_hosts_that_each_hold_a_copy_trains(smoke_yaml: Path, tmp_path: Path) -> None:
    printed = train_on_two_hosts(
        smoke_yaml, tmp_path, "rollout.engine=hf", "placement.learner.nodes=2", "placement.rollout.servers=2",
        "learner.sharding=hybrid",
    )
    for host in ("10.77.0.1", "10.77.0.2"):
        assert re.search(rf"placed: .*{host}: [^;]*rollout/\d, learner/\d", printed), printed
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["buffer"]["buffer/unaccounted"] == 0


NOTE_VARIABLES = """
import os
from pathlib import Path

found = " ".join(os.environ.get(name, "-") for name in ("ASYNC_RL_HOST", "OF_THE_COMMAND"))
Path(__file__).with_name(str(os.getpid())).write_text(found)
"""
"""A sitecustomize.py, which each Python process runs at its start: Ray's overwrite what the system tells of them later.
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_actors_have_the_variables_of_the_ray_start_of_their_host_alone(smoke_yaml: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "sitecustomize.py").write_text(NOTE_VARIABLES)
    seen: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    title = " ".join(process.cmdline())
                    if role := re.match(r"ray::(\w+)Actor|.*async_rl\.cli train", title):
                        seen.add((role[1] or "driver", (notes / str(process.pid)).read_text()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run_on_two_hosts(
            tmp_path, str(smoke_yaml), f"run.dir={tmp_path}", "run.name=two", "staleness.max=1", "rollout.engine=hf",
            "placement.rollout.nodes=1", "placement.learner.resource=learner", "placement.rollout.resource=rollout",
            command_has=("OF_THE_COMMAND=yes",), python_path=notes,
        )
    finally:
        done.set()
        watcher.join(10)
    assert seen == {
        ("driver", "- yes"), ("Buffer", "10.77.0.1 -"), ("Learner", "10.77.0.1 -"), ("Rollout", "10.77.0.2 -")
    }
