"""Finds which protection against programs of others holds on this machine, and under which Python they run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from async_rl.errors import ConfigError
from rollout_server.sandbox import kernel
from rollout_server.sandbox.fork_server import PROJECT

PROBE_TIMEOUT_S = 30
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_PROBE = "from rollout_server.sandbox import namespaces; namespaces.probe()"
_WITHOUT = "Or set task.sandbox: none, if you trust the programs: they then run as this user, with files and network"


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection against programs that this machine has."""

    landlock_abi: int
    """0: there is no Landlock."""
    has_seccomp: bool
    has_namespaces: bool
    """Whether a program may get namespaces of its own."""
    namespaces_error: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether a program can be contained at all."""
        return self.landlock_abi >= 1 and self.has_seccomp

    def __str__(self) -> str:
        if not kernel.IS_KNOWN_MACHINE:
            return "none: the sandbox knows only Linux on x86_64"
        if not self.is_enough:
            parts = (("Landlock", self.landlock_abi), ("seccomp", self.has_seccomp))
            missing = [name for name, has in parts if not has]
            return f"none: the kernel has no {' and no '.join(missing)}"
        user = "a user for each program" if os.getuid() == 0 else f"user {os.getuid()}"
        namespaces = "namespaces" if self.has_namespaces else f"no namespaces ({self.namespaces_error})"
        return f"seccomp, Landlock ABI {self.landlock_abi}, limits, {user}, {namespaces}"


@cache
def find_protection() -> Protection:
    """Return what holds programs on this machine; a short-lived process tries the namespaces."""
    if not kernel.IS_KNOWN_MACHINE:
        return Protection(0, False, False)
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    has_seccomp = actions.exists() and "errno" in actions.read_text().split()
    code = f"import sys; sys.path.insert(0, {PROJECT!r}); {_PROBE}"
    try:
        tried = subprocess.run(
            [find_python(), "-I", "-S", "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
        error = (tried.stderr.strip().splitlines() or [""])[-1] if tried.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as failed:
        error = str(failed)
    return Protection(kernel.landlock_abi(), has_seccomp, not error, error)


def check_protection(*, needs_namespaces: bool) -> None:
    """Check that programs can be contained here.

    Raises:
        ConfigError: they can't, or not in namespaces of their own although `needs_namespaces`.
    """
    found = find_protection()
    if not found.is_enough:
        raise ConfigError(
            f"programs of answers can't be contained on this machine: {found}. Use Linux 5.13 or newer on x86_64 with "
            f"Landlock (lsm=landlock,...) and seccomp. {_WITHOUT}"
        )
    if needs_namespaces and not found.has_namespaces:
        raise ConfigError(
            "programs that need a temporary folder or processes can't be contained on this machine, because user "
            f"namespaces are forbidden: {found.namespaces_error}. Allow them (sysctl user.max_user_namespaces; in "
            "Docker --security-opt seccomp=unconfined), or leave out files and processes"
        )


def find_python(python: str = "") -> str:
    """Return the Python that runs programs: `python`, or this one, or where other users can't read it the system's.

    Raises:
        ConfigError: no Python is found that the users of programs can read.
    """
    choices = [python] if python else [sys.executable, *_PYTHONS]
    for choice in choices:
        if os.access(choice, os.X_OK) and (os.getuid() != 0 or _all_can_read(choice)):
            return choice
    raise ConfigError(
        f"the sandbox needs a Python that every user can read, got {', '.join(choices)}: they are missing, or below a "
        "folder that is closed to others, such as /root. Install one (apt-get install python3), or make the folder "
        "readable"
    )


def _all_can_read(python: str) -> bool:
    """Return whether every user can enter all folders above a Python and above its library."""
    places = [Path(python).absolute(), Path(python).resolve()]
    return all(place.stat().st_mode & 1 for each in places for place in each.parents)
