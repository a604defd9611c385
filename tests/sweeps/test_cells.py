"""The axes of a sweep, its cells, and which settings may differ between them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.config.algorithm import PRESETS
from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.cli import main
from async_rl.tools.sweeps.cells import (
    CORRECTIONS,
    MODES,
    all_cells,
    bounds_of,
    cell_config,
    key_axis,
    named_axis,
    seed_axis,
    staleness_axis,
)
from async_rl.tools.sweeps.sweep import run_sweep, train_command
from tests.kit.sweeps import Trainer, base_yaml, make

pytestmark = pytest.mark.processes  # together they compute for long


def test_the_seed_varies_slowest_and_every_setting_is_in_the_name(tmp_path: Path) -> None:
    axes = [staleness_axis("0,2"), key_axis("learner.lr=1e-4,3e-4"), seed_axis(2, 5)]
    cells = all_cells(axes, tmp_path)
    assert [cell.name for cell in cells[:5]] == [
        "staleness-0.learner.lr-1e-4.seed-5", "staleness-0.learner.lr-3e-4.seed-5",
        "staleness-2.learner.lr-1e-4.seed-5", "staleness-2.learner.lr-3e-4.seed-5",
        "staleness-0.learner.lr-1e-4.seed-6",
    ]  # fmt: skip
    assert set(cells[1].overrides) == {
        "staleness.max=0", "staleness.depth=max", "learner.lr=3e-4", "run.seed=5"
    }


@pytest.mark.parametrize("name", ["runs #2", "ü ß", "2024"])
def test_a_cell_runs_in_its_folder_whatever_yaml_reads_in_its_path(tmp_path: Path, name: str) -> None:
    cell = all_cells([staleness_axis("0"), seed_axis(1, 0)], Path(name) / "s")[0]
    config = cell_config(str(base_yaml(tmp_path)), (), cell)
    assert config.run_dir == cell.folder
    command = train_command(make(tmp_path), cell)
    assert load_config(command[2], command[3:]).run_dir == cell.folder


def test_two_cells_in_one_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path-m_a\.seed-0"):
        all_cells([key_axis("model.path=m/a,m_a"), seed_axis(1, 0)], tmp_path)


def test_the_documented_axes_of_presets_and_corrections_load(tmp_path: Path) -> None:
    quickstart = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    presets = [key_axis(f"algorithm.preset={','.join(PRESETS)}"), staleness_axis("2"), seed_axis(1, 0)]
    critic = ("rollout.engine=hf", "critic.lr=1e-3", "critic.warmup_steps=10")
    configs = [cell_config(quickstart, critic, cell) for cell in all_cells(presets, tmp_path)]
    assert {config.algorithm.preset for config in configs} == PRESETS.keys()
    corrections = named_axis("correction", ",".join(CORRECTIONS), CORRECTIONS)
    exact = [named_axis("mode", "exact", MODES), corrections, staleness_axis("0,8"), seed_axis(1, 0)]
    cells = {(cell.labels["correction"], cell.labels["staleness"]): cell for cell in all_cells(exact, tmp_path)}
    found = {key: cell_config(quickstart, (), cell) for key, cell in cells.items()}
    assert {name: (found[name, "8"].algorithm.old_logprobs, found[name,
        "8"].correction_kind) for name in CORRECTIONS} == {
        "none": ("recompute", "none"), "coupled": ("rollout", "none"), "decoupled_tis": ("recompute", "token_tis"),
    }  # fmt: skip
    assert found["none", "0"].staleness.max == 0


@pytest.mark.parametrize("text", ["0,-1", "0,,1", "two", "1.5", "", "1/", "9/8", "1.3/8"])
def test_bounds_and_depths_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--staleness"):
        bounds_of(text)


def test_a_depth_below_a_bound_is_a_level_of_the_staleness_axis(tmp_path: Path) -> None:
    quickstart = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    cells = all_cells([staleness_axis("8,1.25/8,0,1"), seed_axis(1, 0)], tmp_path)
    assert [cell.labels["staleness"] for cell in cells] == ["0", "1", "1.25/8", "8"]
    configs = [cell_config(quickstart, ("staleness.depth=0",), cell) for cell in cells]
    assert [(config.staleness.max, config.staleness.depth) for config in configs] == [
        (0, "max"), (1, "max"), (8, 1.25), (8, "max")
    ]
    assert len({cell.folder for cell in cells}) == 4


def test_an_axis_is_a_key_with_levels_which_may_be_lists() -> None:
    assert list(key_axis("task.tools=[a:b,c:d],[e:f],[]").levels) == ["[a:b,c:d]", "[e:f]", "[]"]
    with pytest.raises(ConfigError, match=r"^--axis"):
        key_axis("learner.lr")
    with pytest.raises(ConfigError, match=r"^--mode .*'loose'"):
        named_axis("mode", "bounded,loose", {"bounded": (), "exact": ()})


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--seeds", "0"], "--seeds"), (["--name", ".."], "--name"), (["run.resume=/runs/a"], "run.resume"),
        (["--axis", "learner.rate=1"], "learner.rate"), (["--axis", "learner.lr=1e-4,-1"], "learner.lr"),
    ],
)
def test_options_that_can_not_be_used_are_refused_before_anything_starts(
    tmp_path: Path, options: list[str], key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["sweep", str(base_yaml(tmp_path)), "--staleness", "0", "run.dir=runs", *options]) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["staleness.max=4"], "staleness.max"),
        (["--mode", "exact", "weight_sync.on_update=in_place"], "weight_sync.on_update"),
        (["--axis", "task.params={a: 1},{a: 2}", "task.params.a=3"], "task.params"),
        (["--seconds", "60", "run.steps=100"], "run.steps"),
    ],
)
def test_a_key_that_is_set_twice_is_refused(
    tmp_path: Path, words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--staleness", "0,1", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *words, "--dry-run"]
    assert main(["sweep", str(base_yaml(tmp_path)), *given]) == 2
    assert re.search(rf"each key once.*\b{re.escape(key)}\b", capsys.readouterr().err)


@pytest.mark.parametrize(
    "settings", [["weight_sync.every_steps=2"], ["buffer.max_uses=2", "buffer.fresh_fraction=0.5"]]
)
def test_a_config_that_is_valid_at_the_bounds_of_the_sweep_alone_is_swept(tmp_path: Path, settings: list[str]) -> None:
    file = base_yaml(tmp_path)
    assert main(["train", str(file), *settings, "--dry-run"]) == 2
    words = ["--staleness", "2,4", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *settings, "--dry-run"]
    assert main(["sweep", str(file), *words]) == 0


@pytest.mark.parametrize(
    ("axes", "began", "now", "key"),
    [
        ("", (), ("rollout.group_size=4",), "rollout.group_size"),
        ("staleness.max=2", (), ("learner.lr=0.5",), "learner.lr"),  # other cells of the same sweep
        ("algorithm.preset=grpo,dr_grpo", ("algorithm.entropy_coef=0.0",), ("algorithm.entropy_coef=0.5",),
         "algorithm.entropy_coef"),
    ],
)  # fmt: skip
def test_a_sweep_goes_on_only_with_the_settings_that_its_finished_cells_have(
    tmp_path: Path, axes: str, began: tuple[str, ...], now: tuple[str, ...], key: str
) -> None:
    bound = axes.partition("=")[2] if axes.startswith("staleness") else "1"
    more = () if not axes or axes.startswith("staleness") else (key_axis(axes),)
    first = make(tmp_path, axes=(staleness_axis("1"), seed_axis(2, 0), *more), overrides=began)
    run_sweep(dataclasses.replace(first, max_cells=2), Trainer())
    same = dataclasses.replace(first, axes=(staleness_axis(bound), *first.axes[1:]))
    with pytest.raises(ConfigError, match=re.escape(key)):
        run_sweep(dataclasses.replace(same, overrides=now), Trainer())
    assert run_sweep(same, Trainer()).pending == []


def test_trackers_are_off_in_cells_unless_set_and_seconds_replace_steps(tmp_path: Path) -> None:
    cell = all_cells(make(tmp_path).axes, tmp_path)[0]

    def config(**changes: Any) -> Config:
        sweep = make(tmp_path, **changes)
        return cell_config(sweep.config, sweep.base_overrides(), cell)

    plain, asked = config(), config(overrides=("logging.wandb=offline", "logging.trackio=true"), seconds=30.0)
    assert (plain.logging.wandb, plain.logging.trackio, plain.run.seconds) == ("disabled", False, 0.0)
    assert (asked.logging.wandb, asked.logging.trackio, asked.run.seconds) == ("offline", True, 30.0)
    assert asked.run.steps > 1000 * plain.run.steps
