"""Removes what rollout servers that were killed have left behind: folders of sockets, and files in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER_PREFIX = "async-rl-server-"
SETTLE_S = 600.0
"""Anything younger stays: the server that it belongs to may only just be starting."""


def sweep(shared_files: str, shared_memory: Path = Path("/dev/shm")) -> None:
    """Remove folders of servers and files in shared memory that no process uses and that are older than SETTLE_S.

    A process uses a folder if the folder is its TMPDIR, and a file if it has mapped it. A server that is ended in
    order removes its own; see ServerProcess.aclose.

    Args:
        shared_files: pattern of the names of such files; empty: the servers leave none.
    """
    found = list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
    found += shared_memory.glob(shared_files) if shared_files else ()
    old = [path for path in found if time.time() - path.lstat().st_mtime > SETTLE_S]
    if not old:
        return
    in_use = b""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's, whose files can't be removed either
            in_use += (process / "environ").read_bytes() + (process / "maps").read_bytes()
    for path in old:
        if os.fsencode(path) not in in_use:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def mapped_files(pid: int, shared_files: str) -> set[Path]:
    """Return the files with names of the pattern `shared_files` that the children of process `pid` have mapped."""
    files: set[Path] = set()
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            files.update(path for m in child.memory_maps() if (path := Path(m.path)).match(shared_files))
    return files
