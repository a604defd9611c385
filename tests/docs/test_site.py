"""The site of docs/ builds strictly: a wrong link or anchor, or a page that the menu lacks, is an error."""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.kit.documents import ROOT

pytestmark = pytest.mark.processes


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attributes if name in ("href", "src") and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert warnings == []
    return folder


def test_a_link_out_of_the_documents_leads_to_the_repository_and_names_a_file(site: Path) -> None:
    prefix = load_config(str(ROOT / "mkdocs.yml")).extra["repository"] + "/blob/main/"
    found = set()
    for page in site.rglob("*.html"):
        links = Links()
        links.feed(page.read_text())
        found |= {link.removeprefix(prefix).partition("#")[0] for link in links.targets if link.startswith(prefix)}
    assert found
    assert [name for name in sorted(found) if not (ROOT / name).exists()] == []


def test_a_page_loads_nothing_from_the_network(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "fonts.googleapis" not in page and 'src="http' not in page
    assert 'data-md-component="source"' not in page  # it would ask GitHub for the number of stars
