"""The parts of the vLLM engine that need no vLLM: flags, the environment and requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.base.config import (
    Config,
    ModelConfig,
    PlacementConfig,
    RolloutPlacement,
    WeightSyncConfig,
)
from async_rl.base.errors import ConfigError
from async_rl.base.weights.checkpoint_names import write_weights
from async_rl.base.weights.server_admin import Bucket
from rollout_server.engines.http_engine import OpenReply
from rollout_server.engines.vllm.admin import share_bucket
from rollout_server.engines.vllm.engine import (
    group_replies,
    kv_tokens_in,
    refuse_run,
    request_body,
    server_environment,
    server_flags,
)
from rollout_server.engines.vllm.server.launch import API_KEY_VARIABLE, RequireKey
from rollout_server.engines.vllm.server.receiving import check_tensors, checkpoint_shapes
from tests.kit.configs import make_config
from tests.kit.engines.replies import request_for
from tests.kit.models import save_sharp_model, sharp_model

MODEL = SimpleNamespace(
    max_position_embeddings=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    hidden_size=128,
)


def config(**rollout: Any) -> Config:
    return make_config(
        task={"max_prompt_tokens": 100},
        rollout={"engine": "vllm", "group_size": 4, "max_response_tokens": 50, **rollout},
        learner={"prompts_per_step": 8}, eval={"num_prompts": 10, "samples_per_prompt": 2},
        algorithm={"support": "ignore"},
    )


def flags(config: Config, *, on_gpu: bool = False, free_memory_bytes: int = 2**33) -> dict[str, Any]:
    return server_flags(config, MODEL, on_gpu=on_gpu, free_memory_bytes=free_memory_bytes, seed=0)


def test_the_kv_cache_holds_all_that_can_be_in_flight_in_a_quarter_of_memory() -> None:
    # (0 + 1) * 8 groups of 4, and 10 * 2 of the evaluation; 158 tokens are 5 blocks of 32, and one more
    # a token takes 2 * 2 layers * 2 heads * 32 wide * 4 bytes = 1024
    chosen = flags(config())
    assert chosen["max-num-seqs"] == 8 * 4 + 20
    assert chosen["kv-cache-memory-bytes"] == (8 * 4 + 20) * 6 * 32 * 1024
    assert flags(config(), free_memory_bytes=4 * 10**6)["kv-cache-memory-bytes"] == 976 * 1024
    assert flags(config(), free_memory_bytes=0)["kv-cache-memory-bytes"] == 6 * 32 * 1024


def test_on_a_gpu_the_memory_fraction_and_the_tensor_parallel_size_are_used() -> None:
    wide = dataclasses.replace(
        config(gpu_memory_utilization=0.4), placement=PlacementConfig(rollout=RolloutPlacement(tp=2))
    )
    chosen = flags(wide, on_gpu=True)
    assert (chosen["gpu-memory-utilization"], chosen["tensor-parallel-size"]) == (0.4, 2)
    assert chosen["dtype"] == "bfloat16"
    assert chosen["max-cudagraph-capture-size"] == 8 * 4 + 20
    assert not {"kv-cache-memory-bytes", "enforce-eager"} & set(chosen)


@pytest.mark.parametrize(("on_update", "is_off"), [("in_place", True), ("retract", False)])
def test_async_scheduling_is_off_on_gpus_for_pauses_in_place(on_update: str, is_off: bool) -> None:
    pausing = dataclasses.replace(config(), weight_sync=WeightSyncConfig(on_update=on_update))  # type: ignore[arg-type]
    assert flags(pausing, on_gpu=True)["no-async-scheduling"] == is_off


def test_a_users_flags_replace_defaults_except_those_the_engine_needs() -> None:
    assert flags(config(server_args={"max_num_seqs": 7}))["max-num-seqs"] == 7
    with pytest.raises(ConfigError, match=r"^rollout\.server_args .*scheduling_policy"):
        config(server_args={"scheduling_policy": "fcfs"})


def test_a_model_without_an_attention_kernel_is_refused_by_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("rollout_server.engines.vllm.engine.check_environment", lambda config: None)
    small = dataclasses.replace(config(), model=ModelConfig(path=str(model_folder)))
    assert "24" in refuse_run(small)
    wide = dataclasses.replace(config(), model=ModelConfig(path=str(save_sharp_model(tmp_path, "tiny-qwen3"))))
    assert refuse_run(wide) == ""


@pytest.mark.processes
@pytest.mark.parametrize(("rollout", "key"), [
    ({"python": sys.executable}, r"rollout\.python"),  # an environment without vLLM
    ({"python": "/nowhere/python"}, r"rollout\.python"),
    ({"temperature": 3.0}, r"rollout\.temperature "),
    ({"top_p": 0.9}, r"rollout\.top_p "),  # its sampler for GPUs filters the logits before it takes logprobs
    ({"top_k": 9}, r"rollout "),
    ({"min_p": 0.1}, r"rollout "),
    ({"engine": "hf", "python": "/usr/bin/python3"}, r"rollout\.python "),
])
def test_what_vllm_can_not_do_is_refused_before_the_start(
    rollout: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=key):
        refuse_run(config(**rollout))


def test_the_server_sees_none_of_this_projects_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = server_environment(config(), "/venv/bin/python", on_gpu=False)
    assert environment["PYTHONPATH"].endswith("rollout_server/engines/vllm/server")
    assert environment["PATH"] == "/venv/bin:/usr/bin"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in server_environment(config(), "/venv/bin/python", on_gpu=True)


def test_a_request_asks_for_the_full_support_of_the_distribution() -> None:
    request = request_for(0, temperature=0.7, max_tokens=9)
    body = request_body(request, [OpenReply()] * 3, [2, 5], "0.1", 4)
    expected = {"temperature": 0.7, "max_tokens": 9, "stop_token_ids": [2, 5], "n": 3, "logprobs": 0}
    full_support = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert (expected | full_support).items() <= body["sampling_params"].items()
    assert body["token_ids"] == request.prompt.tokens.tolist()
    assert (body["cache_salt"], body["priority"]) == ("training-0", 4)


def test_after_an_abort_each_answer_that_has_begun_gets_a_request_of_its_own() -> None:
    new, begun, other = OpenReply(), OpenReply(tokens=[7]), OpenReply(tokens=[8, 9])
    assert group_replies([begun, new, other]) == [[new], [begun], [other]]
    assert group_replies([begun]) == [[begun]]
    request = request_for(0, max_tokens=9)
    body = request_body(request, [other], [2], "k", 0)
    assert body["token_ids"] == [*request.prompt.tokens.tolist(), 8, 9]
    assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["n"]) == (7, 1)


def test_an_update_must_have_the_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    model = sharp_model("tiny-qwen3", 0)
    write_weights(model.named_parameters(), tmp_path, torch.float32, shard_bytes=100_000)  # shards, with an index
    tensors = dict(model.named_parameters())
    expected = checkpoint_shapes(tmp_path)
    check_tensors(tensors, expected, is_tied=True)
    check_tensors(tensors | {"lm_head.weight": model.lm_head.weight}, expected, is_tied=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        check_tensors(tensors | {"lm_head.weight": model.lm_head.weight}, expected, is_tied=False)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*\[96\]"):
        check_tensors(tensors, expected, is_tied=True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*\[96\].*\[95\]"):
        check_tensors(tensors | {"model.norm.weight": torch.ones(95)}, expected, is_tied=True)


@pytest.mark.processes
def test_another_process_maps_the_memory_of_a_bucket_as_it_is_now() -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    bucket = Bucket(names=["a"], dtypes=["uint8"], shapes=[[40]], data=buffer[:40], is_last=True)
    code = (
        "import json, sys, torch; from rollout_server.engines.vllm.server.receiving import map_memory\n"
        "for line in sys.stdin: print(int(map_memory(json.loads(line), torch.device('cpu'))[:40].sum()), flush=True)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    for value in (1, 2):
        bucket.data.fill_(value)
        print(json.dumps(share_bucket(bucket)), file=other.stdin, flush=True)
        assert other.stdout.readline() == f"{40 * value}\n"
    other.stdin.close()
    assert other.wait(60) == 0


@pytest.mark.parametrize(("given", "passes"), [(b"Bearer right", True), (b"Bearer wrong", False), (None, False)])
def test_a_request_without_the_key_is_answered_with_401(
    given: bytes | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "right")
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append("app")

    async def send(message: Any) -> None:
        seen.append(message.get("status"))

    scope = {"type": "http", "headers": [(b"authorization", given)] if given else []}
    asyncio.run(RequireKey(app)(scope, None, send))  # type: ignore[arg-type]
    assert seen == (["app"] if passes else [401, None])


def test_the_room_in_the_kv_cache_is_read_from_the_metrics_of_the_server() -> None:
    labels = 'block_size="32",cache_dtype="auto",num_gpu_blocks="1200",num_cpu_blocks="None"'
    assert kv_tokens_in(f"# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n") == 38400
    assert kv_tokens_in("vllm:num_requests_running 3.0\n") == 0
    assert kv_tokens_in('vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1.0') == 0
