"""The weight transport of a run follows from who shares a GPU, and a named one is refused where it can't work."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import Config, LearnerPlacement, RolloutPlacement
from async_rl.driver.placement import Reservation, resolve_placement
from async_rl.driver.resources import host_demands
from async_rl.errors import ConfigError
from tests.kit.configs import changed
from tests.kit.placements import TWO_PAIRS, placed_on


def resolved(asked: Config, gpus: int) -> Config:
    """The config of a run on one host with so many GPUs."""
    return resolve_placement(asked, Reservation(None, host_demands(asked, gpus), ["127.0.0.1"]))


@pytest.mark.parametrize(("gpus", "allowed"), [(0, "auto, gloo, cuda_ipc or disk"), (1, "auto, cuda_ipc or disk")])
def test_nccl_is_refused_where_not_every_process_has_a_gpu(gpus: int, allowed: str) -> None:
    asked = changed(placed_on(), weight_sync={"transport": "nccl"})
    refusal = f"must be {allowed} where learner ranks and servers do not have a GPU each, got 'nccl'. Or set placement"
    with pytest.raises(ConfigError, match=refusal):
        resolved(asked, gpus)
    assert resolved(asked, 2).weight_sync.transport == "nccl"


def test_nccl_is_taken_to_a_server_at_a_url_whose_gpu_is_not_known() -> None:
    asked = changed(
        placed_on(), weight_sync={"transport": "nccl"}, rollout={"server_url": "http://127.0.0.1:30000"}
    )  # fmt: skip
    assert resolved(asked, 1).weight_sync.transport == "nccl"


def test_mapped_memory_is_refused_without_naming_nccl_where_gpus_are_shared() -> None:
    asked = placed_on(LearnerPlacement(ranks=1), RolloutPlacement(servers=2), colocated=True)
    with pytest.raises(ConfigError, match="must be auto or disk where servers are on GPUs without a learner rank"):
        resolved(changed(asked, weight_sync={"transport": "cuda_ipc"}), 2)


@pytest.mark.parametrize(("asked", "gpus"), [(TWO_PAIRS, 2), (placed_on(), 1)])
@pytest.mark.parametrize(
    ("sync", "hint"),
    [
        ({"staging": "device"}, "The others do not work where learner ranks and servers share GPUs: set placement"),
        ({"delta": True}, r"Others: disk\."),
    ],
)
def test_what_auto_can_not_carry_on_shared_gpus_is_refused_with_what_works_there(
    asked: Config, gpus: int, sync: dict[str, Any], hint: str
) -> None:
    asked = changed(asked, weight_sync=sync, model={"dtype": "bfloat16"}, staleness={"max": 1})
    with pytest.raises(ConfigError, match=rf"with weight_sync\.transport cuda_ipc, got .*{hint}"):
        resolved(asked, gpus)
