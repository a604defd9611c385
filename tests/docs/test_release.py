"""The version of a release is the same wherever it is written."""

from __future__ import annotations

import re
import tomllib

import yaml

from tests.kit.documents import DOCUMENTS, ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_citation_changelog_and_install_page_have_the_version_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest, *_ = re.findall(r"^## ([\d.]+)", DOCUMENTS["CHANGELOG.md"], re.MULTILINE)
    (wheel,) = re.findall(r"async_rl-([\d.]+)-py3", DOCUMENTS["docs/how-to/install.md"])
    assert {citation["version"], newest, wheel} == {VERSION}


def test_the_citation_has_the_fields_that_its_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "authors", "title"} <= set(citation)


def test_the_templates_of_issues_have_a_name_and_a_description() -> None:
    files = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert files
    for file in files:
        header = yaml.safe_load(file.read_text().split("---")[1])
        assert {"name", "about"} <= set(header), file
