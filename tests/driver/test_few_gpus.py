"""Several hosts that together have fewer GPUs than the run has processes."""

from __future__ import annotations

import pytest

from async_rl.config import LearnerPlacement, RolloutPlacement
from async_rl.driver.resources import host_demands
from async_rl.errors import ConfigError
from tests.kit.placements import placed_on

EACH_HAS_ONE = placed_on(LearnerPlacement(nodes=1), RolloutPlacement(nodes=1, servers=2))


def test_several_hosts_with_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be what 2 GPU\(s\) have room for") as caught:
        host_demands(EACH_HAS_ONE, 2)
    assert "CUDA_VISIBLE_DEVICES= runs all on the CPU" in str(caught.value)


@pytest.mark.parametrize(("gpus_there", "each"), [(0, 0.0), (3, 1.0)])
def test_hosts_without_gpus_and_hosts_with_enough_are_used(gpus_there: int, each: float) -> None:
    demands = host_demands(EACH_HAS_ONE, gpus_there)
    shares = {name: gpus for demand in demands for name, gpus in demand.gpus_of.items() if name != "buffer"}
    assert shares == {"learner/0": each, "rollout/0": each, "rollout/1": each}
