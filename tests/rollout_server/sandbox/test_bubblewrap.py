"""Programs of other languages in bubblewrap: what it holds of all misdeeds, what stays open, and what works."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from async_rl.errors import AsyncRLError, ConfigError
from rollout_server.sandbox import kernel, subprocesses
from rollout_server.sandbox.fork_server import PROJECT
from rollout_server.sandbox.pool import Ended, RunLimits
from rollout_server.sandbox.subprocesses import Bubblewrap
from tests.kit.sandbox.hosts import FORBIDS_NAMESPACES, PYTHON, exposed_host, open_folder
from tests.kit.sandbox.misdeeds import MISDEEDS, SOUND, SOUND_IN_NAMESPACES, TRY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap: scripts/bubblewrap.sh installs it"),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"there is no {PYTHON}"),
    pytest.mark.skipif(not kernel.IS_KNOWN_MACHINE, reason="the filter of system calls is for x86_64"),
]
OPEN = {
    "much memory in several processes": {"600 MB of 512 MB"},  # the limit is of each process
    "full /tmp": {"inodes"},  # bubblewrap has no limit for them; the bytes of /tmp are limited
    "much memory": {"size of a pipe"},  # the kernel limits the pipes of a user
    "locks": {"flock", "record lock"},  # on what is below /usr
}
"""[misdeed] what is not held."""
OWN = {
    "network": {"udp", "bind"},  # at a loopback device of its own
    "reads of others": {
        "read /proc/1/environ", "read /proc/self/environ", "read /proc/self/maps", "read /", "read /proc"
    },
}
"""[misdeed] what a program may do because all that it reaches is its own."""
ENDLESS = {name for name in MISDEEDS if name.startswith("endless")}


def run(program: str, *command: str, stdin: str = "7\n", **limits: float) -> Ended:
    bubblewrap = Bubblewrap(command or [PYTHON, "-I"])
    return asyncio.run(bubblewrap.run(program, stdin, RunLimits(**{"wall_s": 20.0, **limits})))  # type: ignore[arg-type]


def processes_here() -> list[psutil.Process]:
    names = ("bwrap", "prlimit", "python3")
    return [each for each in psutil.Process().children(recursive=True) if name_of(each) in names]


def name_of(process: psutil.Process) -> str:
    """The name of a process; "" if it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.parametrize("name", MISDEEDS)
def test_a_misdeed_is_held_but_for_those_that_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sesame")
    with exposed_host() as values:
        text = TRY + MISDEEDS[name]
        for word, value in (values | {"PARENT": str(os.getpid()), "HAS_NAMESPACES": "True"}).items():
            text = text.replace(word, value)
        ended = run(text, wall_s=1.0 if name in ENDLESS else 20.0, cpu_s=5.0)
    lines = (ended.output + ended.errors).splitlines()
    was_open = {line.removeprefix("OPEN ").partition(":")[0] for line in lines if line.startswith("OPEN")}
    assert was_open == OPEN.get(name, set()) | OWN.get(name, set()), lines
    assert ended.is_late == (name in ENDLESS) and len(ended.output) <= 1 << 20
    assert ended.is_late or was_open or any("held" in line for line in lines), ended
    assert processes_here() == []


def test_what_it_may_read_has_nothing_of_the_host() -> None:
    ended = run(
        "import os\nos.environ.pop('LC_CTYPE', None)  # which Python sets itself\n"
        "print(sorted(os.listdir('/')), os.listdir('/etc'), dict(os.environ), os.listdir('/tmp'), os.getpid(),"
        "[name for name in os.listdir('/proc') if name.isdecimal()], open('/proc/net/dev').read().count(':'))"
    )
    folders = ["bin", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr"]
    environment = {"PATH": "/usr/bin:/bin", "PWD": "/tmp"}
    assert ended.output == f"{folders} ['alternatives'] {environment} ['answer'] 1 ['1'] 1\n"


@pytest.mark.parametrize("name", [*SOUND, *SOUND_IN_NAMESPACES])
def test_sound_programs_work(name: str) -> None:
    program, last = (SOUND | SOUND_IN_NAMESPACES)[name]
    ended = run(program, cpu_s=10.0)
    assert (ended.exit_code, ended.output.strip()) == (0, last), ended


LANGUAGES = {
    "bash": (["bash"], "read n; for i in 1 2; do echo $((n * i)) | cat; done", 512),
    "perl": (["perl"], "my $n = <STDIN>; print $n * 1, \"\\n\", $n * 2, \"\\n\";", 512),
    "awk": (["awk", "-f"], "BEGIN { getline n < \"/dev/stdin\"; print n * 1; print n * 2 }", 512),
    "node": (["node"], "const n = +require('fs').readFileSync(0, 'utf8'); console.log(n * 1);"
             "setTimeout(() => Promise.resolve(n * 2).then(console.log), 1)", 8192),
    "gcc": (["bash"], "cat > a.c <<'X'\n#include <stdio.h>\nint main() { int n; scanf(\"%d\", &n); "
            "printf(\"%d\\n%d\\n\", n, n * 2); }\nX\ngcc a.c -o a && ./a", 1024),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_programs_of_other_languages_work(name: str) -> None:
    if not os.path.exists(f"/usr/bin/{name}"):
        pytest.skip(f"there is no /usr/bin/{name}")
    command, program, memory_mb = LANGUAGES[name]
    ended = run(program, *command, memory_bytes=memory_mb << 20)
    assert (ended.exit_code, ended.output) == (0, "7\n14\n"), ended


def test_where_namespaces_are_forbidden_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as folder:
        wrapper = folder / "bwrap"
        real = shutil.which("bwrap")
        text = FORBIDS_NAMESPACES.format(python=PYTHON, project=PROJECT)
        wrapper.write_text(text.replace(f"os.execv({PYTHON!r}, [{PYTHON!r},", f"os.execv({real!r}, [{real!r},"))
        wrapper.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(wrapper))
        with pytest.raises(ConfigError, match=r"can't run in bubblewrap on this machine: .*ermi.* or set task"):
            Bubblewrap(["bash"])


def test_the_doctor_is_told_whether_other_languages_can_be_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocesses.bubblewrap_problem() == ""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert subprocesses.bubblewrap_problem() == "it is not installed (apt-get install bubblewrap)"


def test_a_command_that_is_not_there_is_refused_before_any_answer_fails() -> None:
    with pytest.raises(ConfigError, match=r"the command no-such-language is not below /usr"):
        Bubblewrap(["no-such-language"])


def test_a_program_that_is_not_started_costs_no_answer_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "_BUBBLEWRAP", (*subprocesses._BUBBLEWRAP, "--ro-bind", "/none", "/none"))
    monkeypatch.setattr(subprocesses, "_problem", lambda bwrap, command: "")
    with pytest.raises(AsyncRLError, match=r"a program could not be contained: bwrap: .*none"):
        run("print(7)")
    monkeypatch.undo()
    assert run("import sys\nsys.exit(3)").exit_code == 3  # it was started, and failed
    assert run("import os\nos.kill(os.getpid(), 9)\nos.abort()").exit_code != 0


@pytest.mark.nightly
def test_a_deadline_at_any_moment_leaves_no_process() -> None:
    async def cut_off() -> list[Ended]:
        bubblewrap = Bubblewrap([PYTHON, "-I", "-S"])
        limits = [RunLimits(wall_s=0.002 * number) for number in range(1, 33)]
        return await asyncio.gather(*(bubblewrap.run("while True: pass", "", each) for each in limits))

    assert all(each.is_late for each in asyncio.run(cut_off()))
    assert processes_here() == []


def test_no_process_is_left_when_the_worker_is_killed() -> None:
    code = f"""if True:
        import asyncio, sys
        sys.path.insert(0, {PROJECT!r})
        from rollout_server.sandbox.pool import RunLimits
        from rollout_server.sandbox.subprocesses import Bubblewrap
        async def main():
            bubblewrap = Bubblewrap(["bash"])
            await asyncio.gather(*(bubblewrap.run("sleep 100 & sleep 200", "", RunLimits(wall_s=60)) for _ in range(4)))
        asyncio.run(main())
    """
    worker = psutil.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 30
    programs: list[psutil.Process] = []
    while sum(name_of(each) == "sleep" for each in programs) < 8:
        assert time.monotonic() < end_s, programs
        time.sleep(0.05)
        programs = worker.children(recursive=True)
    worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs(programs, timeout=10)
    assert [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
