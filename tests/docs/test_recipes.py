"""Each recipe has a README with its commands, is in both tables, and its configuration can be trained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.cli import main
from tests.kit.documents import DOCUMENTS, ROOT, blocks
from tests.kit.models import save_bare_reward_model, save_tiny_model, save_tool_model

pytestmark = pytest.mark.processes
RECIPES = sorted(file.name for file in (ROOT / "recipes").iterdir() if file.is_dir())
TRAINED = re.compile(r"^(?:    )?async-rl train (configs/\S+)", re.MULTILINE)


def readme(name: str) -> str:
    return DOCUMENTS[f"recipes/{name}/README.md"]


def on_cpus(name: str) -> list[str]:
    """The configurations that the commands of a recipe train without a GPU."""
    return sorted({path for block in blocks(readme(name), "bash") for path in TRAINED.findall(block)})


def test_every_recipe_is_in_the_tables_of_the_front_page_and_of_the_folder() -> None:
    assert sorted(re.findall(r"\]\(recipes/(\w+)\)", DOCUMENTS["README.md"])) == RECIPES
    assert sorted(re.findall(r"\| \[\w+\]\((\w+)\)", DOCUMENTS["recipes/README.md"])) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_configuration_that_a_recipe_trains_or_links_is_valid(name: str) -> None:
    for path in {*TRAINED.findall(readme(name)), *re.findall(r"\]\(\.\./\.\./(configs/\S+\.yaml)\)", readme(name))}:
        load_config(ROOT / path)


@pytest.mark.parametrize("path", sorted({path for name in RECIPES for path in on_cpus(name)}))
def test_a_recipe_without_a_gpu_passes_its_dry_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With untrained models and made data in the places of those that the recipe's earlier commands make."""
    for entry in ("configs", "benchmarks", "pyproject.toml"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    if config.sft.base.startswith("tiny-"):
        save_tiny_model(config.sft.base, Path(config.model.path), seed=0)
    else:
        save_tool_model(Path(config.model.path))
    if config.task.path:
        subprocess.run([sys.executable, "configs/shop/orders.py"], check=True, timeout=120)
    if config.reward_model.path:
        save_bare_reward_model(Path(config.reward_model.path), vocab=128)
    if config.task.pretrain_path:
        Path(config.task.pretrain_path).write_text('{"text": "A=abc"}\n' * 8)
    assert main(["train", path, "--dry-run"]) == 0
