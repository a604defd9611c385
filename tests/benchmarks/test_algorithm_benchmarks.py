"""The settings of the benchmarks of presets and corrections."""

from __future__ import annotations

from pathlib import Path

from async_rl.config.presets import PRESETS
from benchmarks import correction, presets
from benchmarks.cells import CORRECTIONS, all_cells, cell_config, seed_axis

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def test_every_preset_is_a_config_that_loads(tmp_path: Path) -> None:
    cells = all_cells((presets.preset_axis(list(PRESETS)), seed_axis(1, 0)), tmp_path)
    assert {cell_config(QUICKSTART, presets.BASE, cell).algorithm.preset for cell in cells} == PRESETS.keys()


def test_every_correction_is_a_config_that_loads(tmp_path: Path) -> None:
    configs = {
        cell.labels["correction"]: cell_config(QUICKSTART, correction.BASE, cell)
        for cell in all_cells((correction.setting_axis(8), seed_axis(1, 0)), tmp_path)
    }
    assert configs.keys() == {"synchronous", *CORRECTIONS}
    assert {name: config.staleness.max for name, config in configs.items()} == {
        "synchronous": 0, "none": 8, "coupled": 8, "decoupled_tis": 8,
    }  # fmt: skip
    kinds = {name: (configs[name].algorithm.proximal, configs[name].correction_kind) for name in CORRECTIONS}
    assert kinds == {
        "none": ("recompute", "none"), "coupled": ("behaviour", "none"), "decoupled_tis": ("recompute", "token_tis"),
    }  # fmt: skip
