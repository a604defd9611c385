"""Training is the same wherever policy, critic and AdamW's moments are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import values_of, weights_of

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.mark.parametrize("rank", [0, 4])
def test_offloading_changes_no_weight_and_no_metric(tiny_model_path: Path, one_rank: None, rank: int) -> None:
    found = {}
    for offload in ("none", "moments", "all"):
        config = learner_config(
            tiny_model_path, model={"lora": {"rank": rank}}, learner={"offload": offload},
            algorithm={"advantage": "gae"},
        )  # fmt: skip
        updater = Updater(config, torch.device("cpu"))
        metrics = [values_of(updater.update(make_batch(seed, seed))) for seed in range(3)]
        found[offload] = metrics, weights_of(updater)
        moments = [updater.optimizers["policy"].state_of(p)["exp_avg"] for p in updater.policy.parameters()
                   if p.requires_grad]  # fmt: skip
        assert all(moment.device.type == "cpu" for moment in moments) and any(moment.any() for moment in moments)
    for offload in ("moments", "all"):
        assert found[offload][0] == found["none"][0]
        for name, weight in found["none"][1].items():
            assert torch.equal(found[offload][1][name], weight), name


def test_offloaded_moments_stay_where_they_are_kept(tiny_model_path: Path, one_rank: None) -> None:
    updater = Updater(learner_config(tiny_model_path, learner={"offload": "moments"}), torch.device("cpu"))
    optimizer, parameters = updater.optimizers["policy"], list(updater.policy.parameters())
    kept = [optimizer.state_of(parameter)["exp_avg_sq"] for parameter in parameters]
    updater.update(make_batch())
    for parameter, moment in zip(parameters, kept, strict=True):
        state = optimizer.state_of(parameter)
        assert state["exp_avg_sq"] is moment and moment.any() and state["step"] == 1
