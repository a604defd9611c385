"""The pinned sets of packages in constraints/."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CUDA_SET = ROOT / "constraints" / "cuda.txt"


def test_the_cuda_set_pins_all_that_sglang_asks_for() -> None:
    """Without a pin the next version of any of them could break the set."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in CUDA_SET.read_text().splitlines() if "==" in line}
    asked = [Requirement(text) for text in metadata.requires("sglang") or []]
    wanted = {canonicalize_name(each.name) for each in asked if not each.marker or each.marker.evaluate({"extra": ""})}
    assert len(wanted) > 50
    assert wanted - pinned == {"cuda-tile"}  # a stub, see docs/how-to/install.md


def test_the_install_page_has_the_versions_of_the_cpu_set_for_sglang() -> None:
    lines = (ROOT / "requirements" / "sglang-cpu-nodeps.txt").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    pinned = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pins = {line for line in pinned if line.partition("==")[0] in names}
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    (command,) = re.findall(r"^pip install --no-deps (a.*)$", page, re.MULTILINE)
    assert set(command.split()) == pins and len(pins) == len(names)
