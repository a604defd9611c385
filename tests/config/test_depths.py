"""How many slots a depth has is one rule for the configuration and the simulator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from buffer.simulate import Workload, simulate
from tests.kit.configs import make_config

USES = [(1, 1.0), (2, 0.5), (2, 0.75), (3, 0.4)]
"""Some buffer.max_uses with some buffer.fresh_fraction."""


def configured(size: int, every_steps: int, uses: tuple[int, float], **staleness: Any) -> Config | None:
    """The configuration with these settings; None if it is refused."""
    try:
        return make_config(
            staleness=staleness, learner={"prompts_per_step": size}, weight_sync={"every_steps": every_steps},
            buffer={"max_uses": uses[0], "fresh_fraction": uses[1]},
        )
    except ConfigError:
        return None


def workload_of(size: int, every_steps: int, uses: tuple[int, float]) -> Workload:
    return Workload(
        prompts_per_step=size, every_steps=every_steps, max_uses=uses[0], fresh_fraction=uses[1], concurrency=size
    )


@pytest.mark.parametrize("uses", USES)
def test_a_depth_is_configured_exactly_if_it_is_simulated(uses: tuple[int, float]) -> None:
    for size, every_steps, bound in itertools.product((1, 2, 3, 4, 7), (1, 2, 3), (1, 2, 3)):
        limits = workload_of(size, every_steps, uses).slot_limits
        for depth in (quarters / 4 for quarters in range(4 * bound + 1)):
            config = configured(size, every_steps, uses, max=bound, depth=depth)
            told = f"{size} groups, {every_steps} steps between pushes, depth {depth} of {bound}"
            assert bool(config) == limits.is_enough(depth) == (depth >= limits.smallest_depth), told
            if config:
                assert config.slot_limits == limits and config.slots == limits.at(depth), told


def test_a_depth_is_simulated_whose_slots_are_those_of_a_larger_one() -> None:
    """With 3 fresh groups a batch depth 2.75 has 11.25 slots, which are 12: as many as depth 3, and 3 batches of 4."""
    assert configured(4, 3, (2, 0.75), max=4, depth=2.75)
    workload = workload_of(4, 3, (2, 0.75))
    assert simulate(workload, 4, 60, depth=2.75) == simulate(workload, 4, 60, depth=3)
    with pytest.raises(ConfigError, match=r"^staleness\.depth"):
        simulate(workload, 4, 60, depth=2.5)
