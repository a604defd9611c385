"""The Hugging Face folders that a run writes on its way and at its end."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.kit.learner.fakes import OpenRun


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_folder_on_the_way_is_the_model_of_a_run_that_ends_there(
    open_run: OpenRun, tmp_path: Path
) -> None:
    for name, steps, every_steps in (("long", 5, 2), ("short", 2, 0)):
        learner = open_run(steps, run={"name": name}, checkpoint={"models_every_steps": every_steps})
        assert [report.version for report in learner.run()] == list(range(steps + 1))
    models = tmp_path / "long" / "models"
    assert {folder.name for folder in models.iterdir()} == {"step_2", "step_4"}
    assert not (tmp_path / "short" / "models").exists()
    assert {file.name for file in (models / "step_2").iterdir()} == {
        file.name for file in (tmp_path / "long" / "model").iterdir()
    }
    early, ended = weights(models / "step_2"), weights(tmp_path / "short" / "model")
    assert all(torch.equal(early[name], ended[name]) for name in ended)
    late = weights(tmp_path / "long" / "model")
    assert not all(torch.equal(early[name], late[name]) for name in late)
