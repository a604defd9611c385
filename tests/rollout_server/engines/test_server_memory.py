"""A running server holds as much memory as the dry run says."""

from __future__ import annotations

import pytest

from async_rl.run.before_start.memory import plan_memory
from learner.memory.plan import GIB
from tests.kit.engines.servers import SGLangServer
from tests.kit.models import load_model

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


def test_the_kv_cache_of_a_server_takes_what_the_plan_says(sglang_server: SGLangServer) -> None:
    plan = plan_memory(sglang_server.config, 0, 64 * GIB)
    (state,) = sglang_server.admin.server_info()["internal_states"]
    held = state["memory_usage"]
    assert held["token_capacity"] == pytest.approx(plan.kv_tokens, rel=0.02)  # a few more for each answer
    assert held["kvcache"] * GIB == pytest.approx(plan.kv_tokens * plan.kv_token, rel=0.15)
    loaded = load_model(plan.config.model.path)
    assert plan.weights == sum(parameter.nbytes for parameter in loaded.parameters())
