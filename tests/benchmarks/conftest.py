from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.factories import make_sweep


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Staleness 0, 1 and 3, three seeds each, all finished."""
    return make_sweep(tmp_path_factory.mktemp("sweep"))
