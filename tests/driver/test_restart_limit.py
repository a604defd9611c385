from __future__ import annotations

import pytest

from async_rl.driver.supervisor import RestartLimit
from async_rl.errors import ProcessDiedError
from tests.kit.configs import make_config


def test_exact_mode_ends_with_a_rollout_server_and_outlives_an_evaluation_server() -> None:
    limit = RestartLimit(make_config(
        staleness={"max": 1, "mode": "exact"}, weight_sync={"on_update": "drain"},
        placement={"eval": {"servers": 1}, "rollout": {"max_restarts": 1}}, eval={"every_steps": 1},
    ))  # fmt: skip
    limit.count("eval/0", ProcessDiedError("gone"))
    with pytest.raises(ProcessDiedError, match="2 times"):
        limit.count("eval/0", ProcessDiedError("gone"))
    with pytest.raises(ProcessDiedError, match=r"^gone$"):
        limit.count("rollout/0", ProcessDiedError("gone"))
