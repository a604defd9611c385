from __future__ import annotations

import pytest

from benchmarks.scale import CELLS, ScaleCell, measure, table

pytestmark = pytest.mark.processes


@pytest.mark.nightly
def test_a_small_cell_is_measured_and_printed() -> None:
    cell = ScaleCell(workers=3, groups=16, tokens=20)
    figures = measure(cell, seconds=1.0)
    assert min(figures.groups_per_s, figures.buffer_us, figures.workers_us) > 0 <= figures.driver_us
    assert figures.buffer_mib > 10 and figures.handout_ms > 0
    (row,) = table([(cell, figures)]).rows
    assert row[:4] == ["3", "16", "20", f"{figures.groups_per_s:.0f}"]


def test_the_cells_span_what_is_asked_one_at_a_time() -> None:
    assert [cell.workers for cell in CELLS if cell.groups == 1024 and cell.tokens == 500] == [1, 4, 16, 64]
    assert [cell.groups for cell in CELLS if cell.tokens == 100][:5] == [64, 256, 1024, 4096, 16_384]
    assert [cell.tokens for cell in CELLS if cell.groups == 256][-4:] == [100, 1000, 8000, 32_000]
