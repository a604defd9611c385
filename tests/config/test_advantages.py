"""Settings that an advantage does not fit: one answer to a prompt, or answers that weigh the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_pp_baseline"])
def test_one_answer_a_prompt_is_refused_with_the_advantages_that_need_no_group(advantage: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, ["rollout.group_size=1", f"algorithm.advantage={advantage}"])
    assert f"rollout.group_size must be at least 2 with algorithm.advantage {advantage}, got 1" in str(caught.value)
    assert "Or set algorithm.advantage: remax or reinforce_pp; gae, too, which trains a critic." in str(caught.value)


@pytest.mark.parametrize("advantage", ["remax", "reinforce_pp", "gae"])
def test_the_advantages_that_are_advised_take_one_answer(advantage: str) -> None:
    config = load_config(QUICKSTART, ["rollout.group_size=1", f"algorithm.advantage={advantage}"])
    assert config.rollout.group_size == 1 and config.algorithm.advantage_entry.needs_critic == (advantage == "gae")


def test_the_length_weighted_baseline_is_refused_where_answers_weigh_the_same() -> None:
    load_config(QUICKSTART, ["algorithm.advantage=opo", "algorithm.aggregation=constant"])
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, ["algorithm.advantage=opo", "algorithm.aggregation=sequence_mean"])
    assert "must be token_mean or constant with algorithm.advantage opo, got 'sequence_mean'" in str(caught.value)


def test_one_ratio_a_row_is_refused_with_returns_that_differ_between_turns() -> None:
    gspo = ["algorithm.preset=gspo", "algorithm.advantage=reinforce_pp"]
    turns = ["task.name=''", "task.env=rollout_server.episodes.environments.chain:Chain"]
    load_config(QUICKSTART, gspo)
    load_config(QUICKSTART, [*gspo, "task.tools=[calculator]"])  # the answer's reward is that of its last turn
    load_config(QUICKSTART, [*turns, "algorithm.advantage=reinforce_pp"])
    load_config(QUICKSTART, [*turns, "algorithm.preset=gspo"])
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [*turns, *gspo])
    assert str(caught.value).startswith(
        "algorithm.advantage must be one of grpo, dr_grpo, rloo, maxrl, reinforce_pp_baseline with algorithm.loss gspo "
        "and task.env, got 'reinforce_pp' (command line). Turns have rewards of their own"
    )
