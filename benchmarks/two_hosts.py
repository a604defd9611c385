"""A command on two hosts of this machine, of which the second one comes, leaves and dies: scripts/two_nodes_here.sh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.marked_command import ASYNC_RL, ROOT, MarkedCommand

SCRIPT = ROOT / "scripts" / "two_nodes_here.sh"
PLACED = ("placement.rollout.nodes=1", "placement.learner.resource=learner", "placement.rollout.resource=rollout")
"""The settings of a run whose learner is on the first host, and whose servers are on any host that offers `rollout`."""
DRAIN_S = 20


def why_not() -> str:
    """Return why this machine can't have network namespaces; empty if it can."""
    probe = f"arl-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
        if made.returncode == 0:
            made = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True)
            subprocess.run(["ip", "netns", "del", probe], check=True)
    except FileNotFoundError:
        return "iproute2 (`ip`) is not installed"
    return "" if made.returncode == 0 else f"network namespaces are not permitted here: {made.stderr.strip()}"


def environment() -> dict[str, str]:
    """Return the environment for SCRIPT. A network interface that is set here, such as loopback, is not for two hosts.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT)}


class TwoHosts:
    """Two hosts for a run with PLACED. At the start only the first is there.

    Args:
        folder: the folder for a file that says whether the second host is there.
        ranks: learner ranks. The first host has CPUs for them and one server.
    """

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self._there, self._cpus = folder / "second-host", ranks + 1

    def start(self, arguments: list[str], log: Path) -> MarkedCommand:
        """Start `async-rl` with these arguments on the first host."""
        variables = environment() | {
            "ASYNC_RL_SECOND_WHILE": str(self._there), "ASYNC_RL_CPUS": str(self._cpus),
            "ASYNC_RL_FIRST_RESOURCES": json.dumps({"learner": 1, "rollout": 1}),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
        }
        self._command = MarkedCommand(arguments, log, ("bash", str(SCRIPT), *ASYNC_RL), variables)
        return self._command

    def come(self) -> None:
        """Let the second host come, or come back once it has left."""
        self._there.touch()

    def leave(self) -> None:
        """Send SIGTERM to `ray start --block` on the second host. Ray announces it, and the host leaves."""
        self._there.unlink()

    def die(self) -> None:
        """End every process of the second host by SIGKILL. It stays away until `come`."""
        pids = ["ip", "netns", "pids", f"arl{self._command.process.pid}b"]
        for pid in subprocess.run(pids, capture_output=True, text=True, check=True).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._there.unlink()
