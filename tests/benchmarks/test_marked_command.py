"""A marked command finds and ends the processes that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from async_rl.errors import WaitTimeoutError
from benchmarks.marked_command import MARK, RAY_AGENTS, ROOT, MarkedCommand, wait_until

pytestmark = pytest.mark.e2e

STARTS_TWO = """
import subprocess, sys
for title in (sys.argv[1], "ray::BufferActor.serve"):
    print(subprocess.Popen([title, "600"], executable="/bin/sleep", start_new_session=True).pid)
"""


@pytest.mark.parametrize("agent", RAY_AGENTS)
def test_an_agent_of_ray_does_not_count_as_left_behind_but_is_ended(agent: str, tmp_path: Path) -> None:
    """The stand-ins have the command lines of Ray's processes and outlive the command that has started them."""
    command = MarkedCommand([agent], tmp_path / "log", (sys.executable, "-c", STARTS_TWO))
    try:
        assert command.wait(30) == 0
        agent_pid, actor_pid = map(int, command.text().split())
        wait_until(lambda: psutil.Process(agent_pid).cmdline()[0] == agent, 30, "the agent's stand-in to start")
        wait_until(lambda: len(command.processes()) > 0, 30, "the actor's stand-in to start")
        assert [process.pid for process in command.processes()] == [actor_pid]
    finally:
        command.kill()
    wait_until(lambda: not any(map(runs, (agent_pid, actor_pid))), 30, "both to be ended")


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


HIDES = "import setproctitle, time; setproctitle.setproctitle('a::' + 'scheduler'); time.sleep(600)"
"""Overwrites the memory in which the system looks for the environment of the process."""
STARTS_ONE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HIDES!r}])"


def test_a_process_that_has_overwritten_its_environment_is_found_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPT_NOENV", raising=False)  # with it, `setproctitle` would leave the environment alone
    command = MarkedCommand([], tmp_path / "log", (sys.executable, "-c", STARTS_ONE))
    try:
        (hidden,) = command.wait_for("a::scheduler")
        assert MARK not in hidden.environ()
        listed = rf"(?s)no process a::server or b::server .* it has:.*{hidden.pid} a::scheduler"
        with pytest.raises(WaitTimeoutError, match=listed):
            command.wait_for("a::server", "b::server")
    finally:
        command.kill()
    wait_until(lambda: not runs(hidden.pid), 30, "it to be ended")


BENCHMARK = """
import sys
from pathlib import Path
from benchmarks.marked_command import MarkedCommand
command = MarkedCommand([], Path(sys.argv[1]), (sys.executable, "-c", "import time; time.sleep(600)"))
try:
    print(command.process.pid, flush=True)
    command.wait(600)
finally:
    command.kill()
"""


def test_a_benchmark_that_gets_sigterm_ends_its_command(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout
        pid = int(benchmark.stdout.readline())
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not runs(pid)
