"""The folder of a rollout server, and the removal of what servers that were killed have left behind.

A server has a folder for its sockets and temporary files (TMPDIR). It holds a lock on a file in it, which the kernel
releases at its end, however it ends; this works across containers, too, which see each other's files but not each
other's processes. The folder also lists the server's files in shared memory, which nothing else shows to be its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER_PREFIX = "async-rl-server-"
SHARED_MEMORY = Path("/dev/shm")
_LOCK, _LIST = "lock", "shared-memory"


def new_folder() -> tuple[Path, int]:
    """Make a folder for a server; returns it and an open file, which holds its lock as long as a process has it open.

    The server must inherit the file.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    unlocked = folder / "unlocked"
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)  # so there is never a lock that a sweep could take before its owner
    return folder, lock


def list_shared_files(folder: Path, pid: int, patterns: Sequence[str], shared_memory: Path = SHARED_MEMORY) -> None:
    """Write into a server's folder which files in shared memory the children of process `pid` have mapped.

    Args:
        patterns: only files with names of one of these patterns are the server's own.
    """
    inodes = set()
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(pid).children(recursive=True):
            lines = Path(f"/proc/{child.pid}/maps").read_text(errors="replace").splitlines()
            # By inode, because the name of a semaphore's file is another one when it is mapped.
            inodes |= {int(line.split()[4]) for line in lines if f"{shared_memory}/" in line}
    found = [path for pattern in patterns for path in shared_memory.glob(pattern)]
    names = []
    for path in found:
        with suppress(OSError):
            if path.lstat().st_ino in inodes:
                names.append(path.name)
    (folder / _LIST).write_text("".join(f"{name}\n" for name in names))


def remove_folder(folder: Path, shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove the folder of a server that has ended, and the files in shared memory that it lists."""
    with suppress(FileNotFoundError):
        for name in (folder / _LIST).read_text().splitlines():
            (shared_memory / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove what this user's servers that were killed have left behind: each folder whose lock nobody holds.

    A server that is ended in order removes its own; see ServerProcess.aclose.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # it is a live server's, or has just been removed by another sweep
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder, shared_memory)
