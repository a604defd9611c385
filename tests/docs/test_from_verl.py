"""docs/from-verl.md names keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.seams import ENGINES

ROOT = Path(__file__).parents[2]


def test_every_key_of_ours_on_the_page_for_verls_users_exists() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "from-verl.md").read_text().splitlines()]
    ours = [key for cells in rows if len(cells) > 3 for key in re.findall(r"`([a-z_.]+)`", cells[2])]
    assert len(ours) > 40
    for key in ours:
        with pytest.raises(ConfigError) as caught:
            load_config(ROOT / "configs" / "quickstart.yaml", [f"{key}=[[]]"])  # fits no key, so unknown ones differ
        assert "unknown key" not in str(caught.value), key


def test_the_page_for_verls_users_names_every_engine() -> None:
    page = (ROOT / "docs" / "from-verl.md").read_text()
    (row,) = [line for line in page.splitlines() if "`rollout.engine`" in line]
    assert all(name in row for name in ENGINES)


def test_the_single_gpu_config_has_the_settings_that_users_of_verl_know() -> None:
    config = load_config(ROOT / "configs" / "gsm8k_single_gpu.yaml")
    assert (config.learner.prompts_per_step, config.learner.lr, config.critic.lr) == (64, 1e-6, 1e-5)
    assert (config.task.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 512)
    assert (config.algorithm.kl.kind, config.algorithm.kl.coef) == ("k1_reward", 0.001)
    assert (config.rollout.mem_fraction, config.shares_gpus) == (0.4, True)


@pytest.mark.parametrize("name", ["gsm8k_single_gpu", "gsm8k_two_node"])
def test_a_gsm8k_config_takes_fifteen_epochs_of_whole_batches(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert config.run.steps == 15 * (7473 // config.learner.prompts_per_step)
