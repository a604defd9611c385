"""Settings that parts from outside declare: found under `params`, checked, and refused with what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.config.section import section
from async_rl.base.errors import ConfigError
from async_rl.base.seams import Advantage, Correction, Loss, TransportEntry

BASE = ["model.path=none", "task.name=reasoning_gym/chain_sum", "rollout.engine=hf"]
LOSS = "tests.extensions.loss:POLICY_GRADIENT"


def nothing(*_: Any) -> None: ...


@section("algorithm.params")
class PowerSettings:
    """Settings of two parts of this file, so that a loss and an advantage may declare one name."""

    power: float = 2.0


@section("weight_sync.params")
class FolderSettings:
    """Settings of a transport."""

    suffix: str = "new"
    keep: int = 1


@dataclass
class PlainSettings:
    """A class of settings without the decorator that checks values."""

    power: float = 2.0


ADVANTAGE = Advantage(of_group=nothing, settings=PowerSettings)
SAME_NAME = Loss(function=nothing, settings=PowerSettings)
UNCHECKED = Loss(function=nothing, settings=PlainSettings)
CORRECTION = Correction(function=nothing, settings=PowerSettings)
TRANSPORT = TransportEntry(open=nothing, delivers="folder", devices=("cpu",), settings=FolderSettings)


def test_a_setting_reaches_the_function_of_its_loss_and_of_no_other(tmp_path: Path) -> None:
    config = load_config(None, [*BASE, f"algorithm.loss={LOSS}", "algorithm.params.bound=0.25"])
    assert config.algorithm.params == {"bound": 0.25}
    assert config.algorithm.load_loss().keywords["settings"].bound == 0.25
    assert not hasattr(config.algorithm.load_advantage(), "keywords")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_settings_that_were_not_given_are_in_the_resolved_configuration() -> None:
    overrides = [*BASE, f"weight_sync.transport={__name__}:TRANSPORT", "weight_sync.params.keep=3"]
    config = load_config(None, overrides)
    assert config.weight_sync.params == {"suffix": "new", "keep": 3}
    assert config.weight_sync.settings == FolderSettings(keep=3)


def test_a_setting_of_one_name_in_two_parts_is_refused() -> None:
    parts = [f"algorithm.loss={__name__}:SAME_NAME", f"algorithm.advantage={__name__}:ADVANTAGE"]
    with pytest.raises(ConfigError, match=r"^algorithm\.params\.power"):
        load_config(None, [*BASE, *parts])


def test_settings_without_the_decorator_are_refused_because_nothing_would_check_them() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss"):
        load_config(None, [*BASE, f"algorithm.loss={__name__}:UNCHECKED"])


def test_a_correction_of_ones_own_has_settings_too() -> None:
    overrides = [f"algorithm.correction.kind={__name__}:CORRECTION", "algorithm.params={power: 3.0}"]
    algorithm = load_config(None, [*BASE, "staleness.max=1", *overrides]).algorithm
    assert algorithm.load_correction(CORRECTION).keywords["settings"] == PowerSettings(power=3.0)


