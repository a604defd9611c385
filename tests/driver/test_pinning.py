from __future__ import annotations

import pytest

from async_rl.config import Config
from async_rl.driver.actors import share_of_cores
from async_rl.errors import ConfigError
from tests.kit.configs import make_config


def pinned(servers: int, ranks: int) -> Config:
    return make_config(placement={"learner": {"ranks": ranks}, "rollout": {"servers": servers}, "pin_cpus": True})


def test_every_process_has_cores_of_its_own() -> None:
    shares = [share_of_cores(pinned(2, 1), number, [0, 1, 2, 3, 6, 7, 9]) for number in range(3)]
    assert shares == [[0, 1], [2, 3], [6, 7]]


def test_too_few_cores_are_refused_with_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"^placement\.pin_cpus"):
        share_of_cores(pinned(2, 1), 0, [0, 1])
