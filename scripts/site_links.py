"""A hook of mkdocs: a link that leaves docs/, to code or results, leads to the repository on the site.

On GitHub the same relative link works as it is.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\]\((?P<path>\.\./[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def to_repository(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        if target.startswith("docs/"):
            return link[0]
        return f"]({config.extra['repository']}/blob/main/{target}{link['anchor'] or ''})"

    return LINK.sub(to_repository, markdown)
