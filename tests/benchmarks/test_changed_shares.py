"""How the shares of values that steps change are measured, on tensors by hand and on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.changed_shares import measure, save_spread, spread, table
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.models import save_bare_model

pytestmark = pytest.mark.usefixtures("one_rank")


def test_spread_weights_lie_anywhere_in_the_cells_of_their_bfloat16_values() -> None:
    generator = torch.Generator().manual_seed(0)
    served = torch.randn(4000, generator=generator).to(torch.bfloat16)
    served[:10] = 0
    noise = spread(served.float(), generator)
    assert not noise[:10].any()
    above = (served.view(torch.int16) + 1).view(torch.bfloat16).float()  # the neighbour further from zero
    moved = (noise / (above - served.float()))[10:]
    assert moved.abs().max() <= 0.5 and moved.abs().mean() == pytest.approx(0.25, abs=0.01)
    assert ((served.float() + noise).to(torch.bfloat16) == served).float().mean() > 0.99  # cells below 2^n are narrower


def test_larger_steps_change_more_values_and_push_more_bytes(tmp_path: Path) -> None:
    save_bare_model(tmp_path / "bare")
    save_spread(str(tmp_path / "bare"), tmp_path / "model")
    batches = [make_batch(seed=version, version=version) for version in range(2)]
    rows = []
    for lr in (1e-6, 1e-4):
        config = learner_config(tmp_path / "model", learner={"lr": lr})
        rows.append({"lr": lr, "start": "spread", **measure(config, batches)})
    few, many = (row["changed"] for row in rows)
    assert 0 < max(few) < min(many) < 1 and max(rows[0]["bytes"]) < min(rows[1]["bytes"])
    first, _ = table(rows, gbit=1.0).rows
    assert first[:3] == ["1e-06", "spread", f"{100 * few[0]:.2f}"]
    assert first[-1] == f"{max(rows[0]['bytes']) * 8e-9:.3f}"
