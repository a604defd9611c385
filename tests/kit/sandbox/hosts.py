"""The sandbox as root, as an ordinary user and where user namespaces are forbidden, and a host with secrets."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_server.sandbox.fork_server import PROJECT
from rollout_server.sandbox.pool import SandboxPool, owner

PYTHON = "/usr/bin/python3"
ORDINARY_UID = 12345
IS_ROOT = os.getuid() == 0

FORBIDS_NAMESPACES = """#!{python} -I
# Forbids what Docker's default profile does (unshare, mount, setns, chroot, pivot_root, clone with CLONE_NEW*).
import os, sys
sys.path.insert(0, {project!r})
from rollout_server.sandbox import kernel as k
rules = []
def add(code, value, skip_if=0, skip_if_not=0): rules.append(k._RULE.pack(code, skip_if, skip_if_not, value))
add(k._LOAD, 0)
for number in (272, 165, 308, 161, 155): add(k._EQUALS, number, 0, 1); add(k._RETURN, k._DENY)
rules += [k._NO_CLONE3, k._CLONE_WITHOUT_NAMESPACES]
add(k._RETURN, k._ALLOW)
k.apply_filter(b"".join(rules))
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""

HAS_OLD_LANDLOCK = """#!{python} -I
# Has the fork server take the kernel's Landlock for an older one.
import os, sys
code = sys.argv.index("-c") + 1
sys.argv[code] = (
    "import sys; sys.path.insert(0, {project!r}); from rollout_server.sandbox import kernel; "
    "kernel.landlock_abi = lambda: {abi}; " + sys.argv[code]
)
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Mode:
    """A way in which the sandbox may run."""

    name: str
    has_namespaces: bool
    is_ordinary: bool = False
    forbids_namespaces: bool = False
    landlock_abi: int = 0
    """Take Landlock for this version of it; 0: for that of the kernel."""
    reads_as_root: bool = False

    @property
    def is_possible(self) -> bool:
        return self.is_ordinary or IS_ROOT


MODES = [
    Mode("root", has_namespaces=False),
    Mode("root with namespaces", has_namespaces=True),
    Mode("user", has_namespaces=False, is_ordinary=True),
    Mode("user with namespaces", has_namespaces=True, is_ordinary=True),
    Mode("user where namespaces are forbidden", has_namespaces=False, is_ordinary=True, forbids_namespaces=True),
    Mode("root where namespaces are forbidden", has_namespaces=False, forbids_namespaces=True),
    Mode("root that reads", has_namespaces=False, reads_as_root=True),
]
OLD_MODES = [
    Mode("user on Linux 5.13", has_namespaces=False, is_ordinary=True, landlock_abi=1),
    Mode("user with namespaces on Linux 5.13", has_namespaces=True, is_ordinary=True, landlock_abi=1),
]
"""Landlock of Linux 5.13, the first, forbids neither signals nor abstract sockets, TCP and truncation."""


@contextmanager
def pool_of(mode: Mode, python: str = PYTHON, preload: Sequence[str] = ()) -> Iterator[SandboxPool]:
    """A pool, not yet started, whose server runs in this mode."""
    user = ORDINARY_UID if mode.is_ordinary and IS_ROOT else None
    with open_folder() as folder:
        if mode.forbids_namespaces or mode.landlock_abi:
            wrapper = folder / "python"
            text = FORBIDS_NAMESPACES if mode.forbids_namespaces else HAS_OLD_LANDLOCK
            wrapper.write_text(text.format(python=python, project=PROJECT, abi=mode.landlock_abi))
            wrapper.chmod(0o755)
            python = str(wrapper)
        yield SandboxPool(
            has_namespaces=mode.has_namespaces, python=python, preload=preload, user=user,
            reads_as_root=mode.reads_as_root,
        )  # fmt: skip


@contextmanager
def python_with(*packages: str) -> Iterator[str]:
    """A Python that every user can read, with copies of packages of this one, which must be of the same version."""
    with open_folder("/var/tmp") as folder:  # programs in namespaces have another /tmp
        (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(PYTHON)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for name in packages:
            found = importlib.util.find_spec(name)
            assert found is not None and found.origin is not None
            for place in (Path(found.origin).parent, Path(found.origin).parent.with_name(f"{name}.libs")):
                if place.exists():
                    shutil.copytree(place, site / place.name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
        yield str(folder / "bin" / "python")


@contextmanager
def open_folder(parent: str | None = None) -> Iterator[Path]:
    """A folder that every user may read."""
    with tempfile.TemporaryDirectory(prefix="sandbox-test-", dir=parent) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def exposed_host() -> Iterator[dict[str, str]]:
    """A folder with a secret and a file to lose, and sockets that listen: the values of the names in misdeeds.py."""
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder("/var/tmp"))  # programs in namespaces have another /tmp
        left = stack.enter_context(open_folder()) / "left"
        left.touch()
        (folder / "victim").touch()
        (folder / "secret").write_text("sesame")
        (folder / "link").symlink_to("/nowhere")
        owner = ORDINARY_UID if IS_ROOT else -1
        for place in (folder, folder / "victim", folder / "secret"):
            os.chown(place, owner, owner)
        (folder / "secret").chmod(0o600)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", port))
        listeners = []
        for address in (f"\0misdeed-{port}", str(folder / "socket")):
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(address)
            listeners[-1].listen()
        (folder / "socket").chmod(0o777)
        datagrams = []
        for address in (f"\0misdeed-datagrams-{port}", str(folder / "datagrams")):
            datagrams.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
            datagrams[-1].bind(address)
        (folder / "datagrams").chmod(0o777)
        yield {"DIR": str(folder), "SOCKET": str(folder / "socket"), "PORT": str(port), "LEFT": str(left)}
        assert select.select([tcp, udp, *listeners, *datagrams], [], [], 0)[0] == [], "a program has reached the host"
        found = os.stat(folder / "secret")
        assert (found.st_mode & 0o777, found.st_size, found.st_uid) == (0o600, 6, os.stat(folder).st_uid)


def processes_of_programs(pool: SandboxPool) -> set[int]:
    """The processes of programs that pools of this process run, wherever they have gone, and have not ended."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_text().split("\0")
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, UnicodeDecodeError):
            continue
        if owner(os.getpid()) in words and state != "Z":
            found.add(int(name))
    return found - {pool.server_pid} - {each for each in found if _is_server_in_namespaces(each)}


def _is_server_in_namespaces(process: int) -> bool:
    """Whether a process is process 1 of namespaces below this one's: programs are another level below."""
    numbers = re.search(r"^NSpid:(.*)$", Path("/proc", str(process), "status").read_text(), re.MULTILINE)
    return numbers is not None and numbers[1].split()[1:] == ["1"]
