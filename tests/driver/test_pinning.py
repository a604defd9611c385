from __future__ import annotations

import pytest

from async_rl.config import Config, LearnerPlacement, ModelConfig, PlacementConfig, RolloutPlacement, TaskConfig
from async_rl.driver.actors import share_of_cores
from async_rl.errors import ConfigError


def config(servers: int, ranks: int) -> Config:
    return Config(
        model=ModelConfig(path="none"), task=TaskConfig(name="reasoning_gym/chain_sum"),
        placement=PlacementConfig(
            learner=LearnerPlacement(ranks=ranks), rollout=RolloutPlacement(servers=servers), pin_cpus=True
        ),
    )


def test_every_process_has_cores_of_its_own() -> None:
    shares = [share_of_cores(config(2, 1), number, [0, 1, 2, 3, 6, 7, 9]) for number in range(3)]
    assert shares == [[0, 1], [2, 3], [6, 7]]


def test_too_few_cores_are_refused_with_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"placement\.pin_cpus.*2 cores for 3 processes.*servers"):
        share_of_cores(config(2, 1), 0, [0, 1])
