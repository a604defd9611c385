"""The pinned sets of packages in constraints/."""

from __future__ import annotations

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
