"""The GPUs that a process of the run sees in a cluster whose Ray leaves CUDA_VISIBLE_DEVICES alone."""

from __future__ import annotations

import os

import pytest

from async_rl.driver.entering import see_own_gpus


@pytest.mark.parametrize(
    ("gpus", "seen"), [([5], "5"), ([2, 3], "2,3"), ([], "0,1,2,3,4,5,6,7")],
)
def test_a_process_sees_the_gpus_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    see_own_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
