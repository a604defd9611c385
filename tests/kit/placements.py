"""Configurations of runs on one host, on two, and with pairs of processes that share a GPU."""

from __future__ import annotations

from async_rl.base.config import Config, LearnerPlacement, RolloutPlacement
from tests.kit.configs import make_config


def placed_on(
    learner: LearnerPlacement | None = None, rollout: RolloutPlacement | None = None, colocated: bool = False
) -> Config:
    return make_config(placement={"learner": learner, "rollout": rollout, "colocated": colocated})


TWO_NODES = placed_on(LearnerPlacement(gpus_per_node=8), RolloutPlacement(nodes=1, servers=2, tp=4))
TWO_PAIRS = placed_on(LearnerPlacement(gpus_per_node=2), RolloutPlacement(servers=2), colocated=True)
