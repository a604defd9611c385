"""A real vLLM server where no other is like it: it refuses wrong updates, drops half ones, ends with its engine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from async_rl.base.errors import ProcessDiedError, WeightSyncError
from rollout_server.engines.vllm.admin import VLLMAdmin
from rollout_server.engines.vllm.engine import server_environment, server_python
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import MODELS, VERSIONS, connected, push, pushing
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.servers import VLLMServer
from tests.kit.engines.vllm import START_S, needs_vllm
from tests.kit.models import sharp_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]

STAGES = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
import weight_receiver
sent = threading.Event()
weight_receiver.dist.broadcast = lambda data, **_: sent.wait(60) and data.fill_(0)
torch.accelerator.synchronize = None  # on a GPU it would wait for the staged part
receiver = weight_receiver.WeightReceiver.__new__(weight_receiver.WeightReceiver)
receiver.device, receiver._group = torch.device("cpu"), object()
receiver._thread, receiver._timeout_s = ThreadPoolExecutor(1), 60.0
receiver.start_weight_update()
receiver.update_weights({"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "staging": "device"})
print(*receiver._tensors)
sent.set()
receiver.drain_pending()
print(*receiver._tensors)
"""
"""The program of a worker that stages a part which arrives late: it prints the tensors it has before and after."""


def without_one(named: dict[str, Tensor]) -> None:
    del named["model.layers.1.mlp.up_proj.weight"]


def with_one_too_short(named: dict[str, Tensor]) -> None:
    named["model.norm.weight"] = named["model.norm.weight"][:-1]


def with_one_too_many(named: dict[str, Tensor]) -> None:
    named["model.layers.2.mlp.up_proj.weight"] = named["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_one, r"layers\.1\.mlp\.up_proj\.weight"), (with_one_too_short, r"model\.norm\.weight .*\[95\]"),
        (with_one_too_many, r"layers\.2\.mlp\.up_proj\.weight"),
    ],
)
def test_a_wrong_update_is_refused_and_the_old_weights_serve_on(
    vllm_server: VLLMServer, transport: str, tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, "in_place", transport)
    version = push(config, url)
    named = {name: parameter.detach() for name, parameter in sharp_model("tiny-qwen3", 1).named_parameters()}
    spoil(named)
    publisher = connected(config, url)
    wrong = next(VERSIONS)
    assert publisher.push(named.items(), wrong).repeats
    with pytest.raises(WeightSyncError, match=message):
        publisher.push(named.items(), wrong)
    publisher.close()
    assert server.admin.served_version() == str(version)
    server.admin.resume()
    request = request_for(2)
    (replies,) = generate(server, request)
    assert {v for a in replies for v in a.versions.tolist()} == {version}
    assert largest_error(MODELS[version], [request], [replies]) < TOLERANCE


def test_an_update_that_breaks_off_changes_nothing_and_the_next_one_works(
    vllm_server: VLLMServer, tmp_path: Path
) -> None:
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, "retract", "disk")
    version = push(config, url)
    folder = tmp_path / "half"
    sharp_model("tiny-qwen3", 1).save_pretrained(folder)
    admin: VLLMAdmin = server.admin
    admin.pause("retract")
    admin.begin_update()
    admin.load_folder(folder, None)
    admin.end_update()  # the learner gives up: it has not sent the version
    admin.resume()
    request = request_for(4)
    (replies,) = generate(server, request)
    assert largest_error(MODELS[version], [request], [replies]) < TOLERANCE
    admin.begin_update()  # by a learner that ends right after
    assert push(config, url) == version + 1


def test_weights_that_were_not_pushed_are_named(vllm_server: VLLMServer, tmp_path: Path) -> None:
    admin: VLLMAdmin = vllm_server.admin
    admin.pause("retract")
    assert admin.unloaded_weights() == []
    admin.erase_weights()
    assert "model.layers.1.input_layernorm.weight" in admin.unloaded_weights()  # linear layers are packed on a CPU
    push(pushing(vllm_server, tmp_path, "retract", "gloo"), vllm_server.engine.url)
    assert admin.unloaded_weights() == []


def test_the_model_goes_on_while_a_part_is_staged() -> None:
    """The call that begins a staged part returns without it, and does not wait for the device."""
    needs_vllm()
    config = server_config("vllm", Path())
    environment = server_environment(config, python := server_python(config), on_gpu=False)
    said = subprocess.run([python, "-c", STAGES], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said.splitlines()[-2:] == ["", "w"]


def test_a_server_ends_when_its_engine_dies_while_a_push_waits_for_it(vllm_model: Path, tmp_path: Path) -> None:
    """vLLM would wait for the end of the push's request, which never comes, and the run with it."""
    needs_vllm()
    server = EngineInThread(server_config("vllm", vllm_model), tmp_path)
    try:
        server.run(server.engine.start(), START_S)
        admin = VLLMAdmin(server.config, server.engine.url)
        admin.pause("in_place")
        with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor() as threads:  # no store answers there
            place = {"host": "127.0.0.1", "port": mute.getsockname()[1], "backend": "gloo"}
            joining = threads.submit(admin.join_group, name="g", first_rank=1, world_size=2, **place)
            mute.accept()
            for child in psutil.Process(server.engine.server.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one that ended with the engine
                    if "EngineCore" in " ".join(child.cmdline()):
                        child.kill()
            with pytest.raises(WeightSyncError, match="rollout server"):
                joining.result(60)
        with pytest.raises(ProcessDiedError, match="exit code 1"):
            generate(server, request_for(1))
    finally:
        server.close()
