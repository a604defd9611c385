"""A real vLLM server whose weights are set to NaN before a push, as the first push of a run does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_server.engines.vllm.admin import VLLMAdmin
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import MODELS, connected, new_version, push, pushing
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_a_push_loads_every_weight_of_the_server(vllm_server: EngineInThread, transport: str, tmp_path: Path) -> None:
    config, url = pushing(vllm_server, tmp_path, "retract", transport), vllm_server.engine.url
    config.run_dir.mkdir(parents=True)
    publisher, version = connected(config, url), new_version(config)
    report = publisher.push(MODELS[version].named_parameters(), version, erases=True)
    publisher.close()
    assert report.lost == ()
    requests = [request_for(3)]
    assert largest_error(MODELS[version], requests, generate(vllm_server, *requests)) < TOLERANCE


def test_weights_that_were_not_pushed_are_named(vllm_server: EngineInThread, tmp_path: Path) -> None:
    admin = VLLMAdmin(vllm_server.config, vllm_server.engine.url)
    admin.pause("retract")
    assert admin.unloaded_weights() == []
    admin.erase_weights()
    assert "model.layers.1.input_layernorm.weight" in admin.unloaded_weights()  # linear layers are packed on a CPU
    push(pushing(vllm_server, tmp_path, "retract", "gloo"), vllm_server.engine.url)
    assert admin.unloaded_weights() == []
