"""Programs that misbehave or cheat, and the mark of tests that need bubblewrap."""

from __future__ import annotations

import shutil

import pytest

needs_bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="needs bubblewrap: scripts/bubblewrap.sh installs it"
)
