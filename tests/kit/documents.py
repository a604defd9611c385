"""The documents of the project, and how their commands are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
RECIPES = sorted((ROOT / "recipes").rglob("*.md"))
FILES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md")), *RECIPES]
DOCUMENTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path, timeout_s: float) -> None:
    """As in a shell with the environment active; `async-rl` is the one of this checkout, installed or not."""
    as_module = re.sub(r"^async-rl\b", "python -m async_rl.cli", command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", as_module],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


def documented_queries() -> list[str]:
    """The SQL that the documents show for a journal."""
    return blocks(DOCUMENTS["docs/reference/run-directory.md"], "sql")
