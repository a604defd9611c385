"""`async-rl view` in a process of its own, for tests that ask it for pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

END_LIMIT_S = 60.0


class ViewServer:
    """Serves the page of a folder on a free port, until `close`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "async_rl.cli", "view", str(folder), "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://localhost:\d+", line)
        assert found, line + self._process.stdout.read()
        self.url = found[0]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(END_LIMIT_S)
