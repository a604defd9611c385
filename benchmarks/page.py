"""The result files of a benchmark: a page in Markdown, and its numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.tools.sweeps.machine import describe_machine


def machine_text() -> str:
    """Return the machine in one line: processor, system, commit, cores."""
    machine = describe_machine()
    return ", ".join(machine[key] for key in ("processor", "system", "commit")) + f", {machine['cores']} cores"


def write_page(out: Path, page: str, numbers: Any) -> None:
    """Print the Markdown `page`; write it to the file `out` + .md, and `numbers` to `out` + .json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.md").write_text(page)
    out.with_name(f"{out.name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(page)
