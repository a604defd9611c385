"""The files that a run has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without a line that is still being written; none if there is no file yet."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return list(map(json.loads, text[: text.rfind("\n") + 1].splitlines()))
