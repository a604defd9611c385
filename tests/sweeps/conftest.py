from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.sweeps import make_sweep


@pytest.fixture(scope="session", autouse=True)
def small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_rl.tools.sweeps.plots.DPI", 20)
        yield


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty files, but in fixtures of a module or a session: to draw one takes longer than all else."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: Path(file).touch())


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Staleness 0, 1 and 3, three seeds each, all finished."""
    return make_sweep(tmp_path_factory.mktemp("sweep"))
