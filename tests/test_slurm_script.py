"""scripts/two_nodes.slurm with stand-ins for SLURM's and Ray's programs, which write down how they are called."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from benchmarks.marked_command import wait_until

ROOT = Path(__file__).parents[1]
Start = Callable[..., "subprocess.Popen[str]"]
PROGRAMS = {
    "scontrol": '''
case "$1 $2" in
    "show hostnames") printf "a\\nb\\n";;
    "show job") echo "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=$(cat preempted)";;
    *) echo "scontrol $*" >> calls;;
esac''',
    "srun": '''
echo "srun $*" >> calls
while [[ "$1" == -* ]]; do [ "$1" = -w ] && shift && export NODE="$1"; shift; done
exec "$@"''',
    "hostname": '''
case $1 in
    --ip-address) echo "${NAMED-127.0.1.1}";;
    --all-ip-addresses) [ "$NODE" = a ] && echo "10.0.0.1 fe80::1" || echo "10.0.0.2 fe80::2";;
esac''',
    "ray": """
echo "ray $*" >> calls
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> tokens
case $1 in
    start) echo node >> nodes; exec sleep 100;;
    status)
        n=$(cat nodes | wc -l); [ "$LATE" ] && n=1
        echo Active:; for i in $(seq $n); do echo " 1 node_$i"; done; echo Pending:; echo " 1 node_x";;
esac""",
    "async-rl": """
echo "async-rl $*" >> calls
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> tokens
[ "$1" = train ] || exec sleep ${DOCTOR_TAKES:-0}
trap 'exit 130' TERM
[ ! "$PREEMPTED" ] || { echo 2026-02-02T00:00:00 > preempted; exit 1; }
[ ! "$FAILS" ] || exit 1
for i in $(seq ${TRAINS:-1}); do sleep 0.1; done""",
    "sleep": '[ "$1" = 3 ] && set -- 0.02; exec /bin/sleep "$@"',
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "calls").touch()
    (tmp_path / "nodes").touch()
    (tmp_path / "preempted").write_text("None\n")
    jobs: list[subprocess.Popen[str]] = []

    def started(*words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ASYNC_RL_ACTIVATE": "/dev/null",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "96",
            "LATE": "", **variables,
        }
        jobs.append(subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "two_nodes.slurm"), *words], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ))  # fmt: skip
        return jobs[-1]

    yield started
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def calls(folder: Path, program: str) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith(program)]


@pytest.mark.processes
def test_a_job_waits_for_its_nodes_and_starts_the_run_or_goes_on_with_it(tmp_path: Path, start: Start) -> None:
    job = start("configs/mine.yaml", "run.steps=9")
    assert job.wait(60) == 0
    # the name of a host means 127.0.1.1 there, as in Debian's /etc/hosts
    assert calls(tmp_path, "ray start") == [
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --block",
        "ray start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 --block",
    ]
    (token,) = set((tmp_path / "tokens").read_text().splitlines())  # every call of Ray has the same
    assert re.fullmatch("token [0-9a-f]{48}", token)
    steps = calls(tmp_path, "srun")
    assert steps and all("--cpus-per-task=96" in step for step in steps)
    assert calls(tmp_path, "async-rl") == [
        "async-rl doctor configs/mine.yaml run.steps=9", "async-rl train configs/mine.yaml run.steps=9 --resume auto"
    ]
    assert calls(tmp_path, "scontrol") == []


def test_the_signal_comes_long_enough_before_the_end_for_the_run_to_end() -> None:
    text = (ROOT / "scripts" / "two_nodes.slurm").read_text()
    (before_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    (config,) = re.findall(r"\$\{1:-(\S+)\}", text)
    timeouts = load_config(ROOT / config, []).timeouts
    assert int(before_s) >= timeouts.interrupt_s + 240


@pytest.mark.processes
def test_a_preempted_job_lets_the_run_end_and_goes_back_into_the_queue(tmp_path: Path, start: Start) -> None:
    job = start(TRAINS="1000")
    wait_until(lambda: len(calls(tmp_path, "async-rl train")) == 1, 30, "the run to start")
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130
    assert calls(tmp_path, "async-rl train") == ["async-rl train configs/gsm8k_two_node.yaml --resume auto"]
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 7"]


@pytest.mark.processes
def test_a_job_whose_steps_alone_got_the_signal_goes_back_into_the_queue(tmp_path: Path, start: Start) -> None:
    assert start(PREEMPTED="yes").wait(60) == 1
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 7"]
    (tmp_path / "calls").write_text("")
    assert start(FAILS="yes").wait(60) == 1, "the time of an earlier preemption is still told of the job"
    assert calls(tmp_path, "scontrol") == []


@pytest.mark.processes
def test_a_run_gets_each_signal_and_is_not_queued_again_once_it_has_trained(tmp_path: Path, start: Start) -> None:
    (tmp_path / "bin" / "async-rl").write_text(
        "#!/usr/bin/env bash\necho async-rl $* >> calls\n[ $1 = train ] || exit 0\n"
        "trap 'n=$((n + 1)); echo told >> calls' TERM\nwhile [ ${n:-0} -lt 2 ]; do sleep 0.1; done\nsleep 0.5\n"
    )
    job = start()
    wait_until(lambda: len(calls(tmp_path, "async-rl train")) == 1, 30, "the run to start")
    for count in (1, 2):
        job.send_signal(signal.SIGTERM)
        wait_until(lambda count=count: len(calls(tmp_path, "told")) == count, 30, "the signal to reach the run")
    assert job.wait(60) == 0
    assert calls(tmp_path, "scontrol") == []


@pytest.mark.processes
def test_a_node_that_does_not_join_ends_the_job_with_a_sentence(tmp_path: Path, start: Start) -> None:
    job = start(LATE="yes")
    assert job.wait(60) == 1
    assert any("1 of 2 nodes" in line for line in job.stdout)  # type: ignore[union-attr]
    assert calls(tmp_path, "async-rl") == []
