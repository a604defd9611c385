"""Names the pages of the documentation where they lie, for messages."""

from __future__ import annotations

from pathlib import Path

from async_rl.base.seams.user_modules import PROJECT


def doc_page(name: str) -> str:
    """Return the path of a page: docs/NAME in the repository; where async-rl is installed from a wheel, its file there.

    The wheel holds the pages in async_rl/docs, which is a link to docs in the repository.
    """
    in_repository, in_wheel = Path(PROJECT, "docs", name), Path(PROJECT, "async_rl", "docs", name)
    return str(in_wheel) if in_wheel.exists() and not in_repository.exists() else f"docs/{name}"
