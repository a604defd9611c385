"""What the tables of presets and corrections say of runs made by hand."""

from __future__ import annotations

from pathlib import Path

from async_rl.config.presets import PRESETS
from benchmarks.cells import CORRECTIONS, all_cells, cell_config, seed_axis
from benchmarks.correction import correction_table, setting_axis
from benchmarks.presets import BASE, preset_axis, presets_table
from benchmarks.results import Run

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def made(axis: str, label: str, seed: int, start: float, end: float) -> Run:
    step = {
        "step": 1.0, "staleness/mean": 8.0, "reward/mean": end, "offpolicy/ess": 0.5, "policy/entropy": 0.25,
        "offpolicy/truncated_fraction": 0.01, "offpolicy/kl_behaviour_proximal_k3": 0.02,
    }  # fmt: skip
    steps = [{**step, "step": float(number)} for number in (1, 2)]
    evals = [(0.0, 0.0, start), (2.0, 60.0, end)]
    return Run({axis: label, "seed": str(seed)}, {"seconds": 60.0}, steps, evals, Path("none"))


def test_every_preset_and_every_correction_is_a_config_that_loads(tmp_path: Path) -> None:
    cells = all_cells((preset_axis(list(PRESETS)), seed_axis(1, 0)), tmp_path)
    assert {cell_config(QUICKSTART, BASE, cell).algorithm.preset for cell in cells} == PRESETS.keys()
    configs = {
        cell.labels["setting"]: cell_config(QUICKSTART, (), cell)
        for cell in all_cells((setting_axis(8), seed_axis(1, 0)), tmp_path)
    }
    assert configs.keys() == {"synchronous", *CORRECTIONS}
    assert configs["synchronous"].staleness.max == 0
    kinds = {name: (configs[name].algorithm.proximal, configs[name].correction_kind) for name in CORRECTIONS}
    assert kinds == {
        "none": ("recompute", "none"), "coupled": ("behaviour", "none"), "decoupled_tis": ("recompute", "token_tis"),
    }  # fmt: skip


def test_the_presets_table_has_means_with_errors_and_the_gain() -> None:
    runs = [made("preset", "grpo", seed, 0.3, end) for seed, end in enumerate((0.5, 0.6, 0.7))]
    (row,) = presets_table(runs).splitlines()[2:]
    assert row.startswith("| grpo | 3 | 0.300 ± 0.000 | 0.600 ± 0.058 | +0.300 ± 0.058 | 0.035 | 0.500 | 1.00% | 1.0 |")


def test_the_correction_table_says_whether_the_difference_is_one() -> None:
    corrected = [made("setting", "decoupled_tis", seed, 0.3, end) for seed, end in enumerate((0.60, 0.61, 0.62))]
    clear = [made("setting", "none", seed, 0.3, end) for seed, end in enumerate((0.10, 0.12, 0.11))]
    noisy = [made("setting", "none", seed, 0.3, end) for seed, end in enumerate((0.10, 0.95, 0.61))]
    assert "held-out accuracy at the end: +0.500" in correction_table([*corrected, *clear])
    assert "different." in correction_table([*corrected, *clear])
    assert "different." not in correction_table([*corrected, *noisy])
    assert "not separable" in correction_table([*corrected, *noisy])
    assert "Not all settings have finished." in correction_table(clear)
