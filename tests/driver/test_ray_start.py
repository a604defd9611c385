"""A Ray that does not start within its own limit is named."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.driver.placement import open_ray
from async_rl.errors import WaitTimeoutError
from tests.kit.configs import make_config


@pytest.mark.parametrize(
    ("of_ray", "error", "said"),
    [
        (Exception("The current node timed out during startup. This"), WaitTimeoutError, "the driver waited 30 s"),
        (ValueError("another mistake"), ValueError, "another mistake"),
    ],
)
def test_a_ray_that_does_not_start_in_time_ends_the_run_with_a_sentence(
    of_ray: Exception, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise of_ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(error, match=said), open_ray(make_config()):
        pytest.fail("Ray has not started")
