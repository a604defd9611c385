"""The page on the guard: its example is a configuration that works, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from async_rl.config.loading import load_config
from async_rl.guard.signals import SIGNALS
from tests.kit.documents import DOCUMENTS, blocks

PAGE = DOCUMENTS["docs/guard.md"]


def test_the_example_of_the_page_is_a_configuration_that_rolls_back(tmp_path: Path) -> None:
    (example,) = blocks(PAGE, "yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": {"path": "x"}, **yaml.safe_load(example)}))
    config = load_config(tmp_path / "run.yaml")
    assert config.guard_action == "rollback" and config.eval.gold_reward == "my_rewards:is_right"


def test_the_page_names_each_signal_and_its_limit() -> None:
    assert set(re.findall(r"`guard/(\w+)`", PAGE)) == set(SIGNALS)
    assert set(re.findall(r"`guard\.(\w+)_limit`", PAGE)) == set(SIGNALS)
