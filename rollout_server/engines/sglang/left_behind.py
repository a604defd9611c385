"""Removes what SGLang servers that were killed have left behind: folders of sockets, and load reports in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

FOLDER_PREFIX = "async-rl-sglang-"
SETTLE_S = 600.0
"""Anything younger stays: the server that it belongs to may only just be starting."""


def sweep(shared_memory: Path = Path("/dev/shm")) -> None:
    """Remove socket folders and load reports of SGLang servers that no process uses and that are older than SETTLE_S.

    A process uses a folder if the folder is its TMPDIR, and a report if it has mapped it. A server that is ended in
    order removes its own; see ServerProcess.aclose.
    """
    found = [*Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"), *shared_memory.glob("sglang_loads_*")]
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
