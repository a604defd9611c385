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
