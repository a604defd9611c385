"""Flags of servers and requests to them, for SGLang and vLLM; neither has to be installed."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import Config, ModelConfig, NetworkConfig, PlacementConfig, StalenessConfig, WeightSyncConfig
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.models_and_data.experts import Experts
from rollout_server.engines.base import GenerationRequest, Purpose
from rollout_server.engines.http_engine import OpenReply
from rollout_server.engines.sglang import launch
from rollout_server.engines.sglang.engine import (
    SGLangEngine,
    extend_reply,
    primer_body,
    read_routing,
    request_body,
    sampling_seed,
)
from rollout_server.engines.vllm import engine as vllm
from rollout_server.engines.vllm.server.launch import API_KEY_VARIABLE, RequireKey
from tests.kit.configs import changed, make_config
from tests.kit.engines.replies import request_for
from tests.kit.models import save_bare_model, save_sharp_model
from tests.kit.tiny_moe import save_moe

MODEL = SimpleNamespace(
    max_position_embeddings=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    hidden_size=128, vocab_size=1000,
)
for_both = pytest.mark.parametrize("engine", ["sglang", "vllm"])


def config(engine: str = "sglang", **rollout: Any) -> Config:
    return make_config(
        task={"max_prompt_tokens": 100}, eval={"num_prompts": 10, "samples_per_prompt": 2},
        rollout={"engine": engine, "group_size": 4, "max_response_tokens": 50, **rollout},
        learner={"prompts_per_step": 8},
        algorithm={"support": "ignore" if engine == "vllm" else "replay"},
    )


def flags(config: Config, *, on_gpu: bool = False) -> dict[str, Any]:
    server_flags = launch.server_flags if config.rollout.engine == "sglang" else vllm.server_flags
    return server_flags(config, MODEL, on_gpu=on_gpu, free_memory_bytes=2**33, seed=0)


def body_of(engine: str, request: GenerationRequest, replies: list[OpenReply]) -> tuple[list[int], dict[str, Any]]:
    """The tokens and the sampling settings of the body of a request."""
    if engine == "sglang":
        body = request_body(request, replies, [2, 5], "k.", 4)
        assert all(each == body["sampling_params"][0] | {"sampling_seed": each["sampling_seed"]}
                   for each in body["sampling_params"])  # fmt: skip
        tokens, sampling, logprobs, salt = body["input_ids"][0], body["sampling_params"][0], 0, body["extra_key"]
        assert body["return_logprob"] and primer_body(request, "k.", 4)["extra_key"] == salt
    else:
        body = vllm.request_body(request, replies, [2, 5], "k", 4)
        tokens, sampling, salt = body["token_ids"], body["sampling_params"], body["cache_salt"]
        logprobs = sampling["logprobs"]
    assert (logprobs, salt, body["priority"]) == (0, "training-0", 4)
    return tokens, sampling


@for_both
def test_a_request_asks_for_the_full_support_and_after_an_abort_for_the_rest(engine: str) -> None:
    request = request_for(0, temperature=0.7, max_tokens=9)
    full_support = {
        "temperature": 0.7, "stop_token_ids": [2, 5], "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "top_k": -1 if engine == "sglang" else 0,
    }
    limit = "max_new_tokens" if engine == "sglang" else "max_tokens"
    for replies, sampled in (([OpenReply()] * 3, []), ([OpenReply(tokens=[7, 8])], [7, 8])):
        tokens, sampling = body_of(engine, request, replies)
        assert tokens == [*request.prompt.tokens.tolist(), *sampled]
        assert full_support.items() <= sampling.items() and sampling[limit] == 9 - len(sampled)


@for_both
def test_evaluations_queue_behind_groups_and_baselines_with_theirs(engine: str, tmp_path: Path) -> None:
    opened = (SGLangEngine if engine == "sglang" else vllm.VLLMEngine)(config(engine), 0, tmp_path)
    asked = (
        (Purpose.TRAINING, 7), (Purpose.TRAINING, 6), (Purpose.BASELINE, 6), (Purpose.EVALUATION, 0),
        (Purpose.TRAINING, 8), (Purpose.EVALUATION, 0),
    )  # fmt: skip
    requests = [request_for(1, purpose=purpose, start_version=version) for purpose, version in asked]
    assert list(map(opened.priority, requests)) == [7, 6, 6, 8, 8, 9]


@for_both
@pytest.mark.parametrize("on_update", ["in_place", "retract"])
def test_no_forward_whose_tokens_could_get_its_version_runs_ahead_of_a_pause(
    engine: str, on_update: str
) -> None:
    speculating = {"speculative_algorithm": "EAGLE"} if engine == "sglang" else {}
    pausing = changed(config(engine, server_args=speculating), weight_sync=WeightSyncConfig(on_update=on_update))  # type: ignore[arg-type]
    flag = "disable-overlap-schedule" if engine == "sglang" else "no-async-scheduling"
    assert flags(pausing, on_gpu=True)[flag] == (on_update == "in_place")


@for_both
def test_a_users_flags_replace_defaults_except_those_the_pipeline_needs(engine: str) -> None:
    most = {"sglang": "max_running_requests", "vllm": "max_num_seqs"}[engine]
    assert flags(config(engine, server_args={most: 7}))[most.replace("_", "-")] == 7
    with pytest.raises(ConfigError, match=r"^rollout\.server_args "):
        config(engine, server_args={"sglang": {"port": 30000}, "vllm": {"scheduling_policy": "fcfs"}}[engine])


@for_both
def test_a_gpu_server_has_its_memory_share_and_graphs_up_to_the_replies_in_flight(engine: str) -> None:
    names = {"sglang": ("mem-fraction-static", "cuda-graph-max-bs-decode"),
             "vllm": ("gpu-memory-utilization", "max-cudagraph-capture-size")}[engine]  # fmt: skip
    few = config(engine, gpu_memory_utilization=0.4)
    many = changed(few, staleness=StalenessConfig(max=60))
    for each, replies in ((few, 8 * 4 + 10 * 2), (many, 1024)):
        chosen = flags(each, on_gpu=True)
        assert [chosen[name] for name in (*names, "dtype")] == [0.4, replies, "bfloat16"]


def test_a_gpu_server_computes_float32_in_full_precision() -> None:
    for dtype, computes_float32 in (("float32", True), ("auto", False)):
        typed = changed(config(), model=ModelConfig(path="m", dtype=dtype))  # type: ignore[arg-type]
        environment = launch.server_environment(typed, chosen := flags(typed, on_gpu=True))
        assert ("TRITON_F32_DEFAULT" in environment) == computes_float32
        assert ("SGLANG_FORCE_FUSED_OP_BACKEND" in environment) == computes_float32
        assert chosen.get("attention-backend") == ("triton" if computes_float32 else None)


def test_the_processes_of_a_server_meet_at_another_port_of_its_range(tmp_path: Path) -> None:
    typed = changed(config(), network=NetworkConfig(ports="21001-21002"))
    command = launch.sglang_process("server 0", flags(typed), tmp_path / "log", typed).command(21001)
    assert {("--port", "21001"), ("--nccl-port", "21002")} < set(itertools.pairwise(command))


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_server_that_takes_turns_on_the_learners_gpu_can_release_its_memory(
    in_turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it finds a CUDA runtime that came as a wheel, and has no expandable segments, which can't be released."""
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libcudart.so.13").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    shared = changed(
        config(), placement=PlacementConfig(colocated=True), staleness=StalenessConfig(max=0 if in_turns else 1)
    )
    chosen = flags(shared, on_gpu=True)
    assert chosen.get("enable-memory-saver", False) == in_turns
    environment = launch.server_environment(shared, chosen)
    assert environment["LD_LIBRARY_PATH"] == (f"/mine:{tmp_path}/nvidia/cu13/lib" if in_turns else "/mine")
    assert ("expandable_segments" in environment["PYTORCH_ALLOC_CONF"]) != in_turns
    assert environment["PYTORCH_ALLOC_CONF"].startswith("max_split_size_mb:128")


def test_supports_have_a_limit_in_server_and_request_and_a_primer_asks_for_none() -> None:
    room = "sampling-mask-max-tokens"
    assert room not in flags(config()) and flags(config(top_p=0.9))[room] == MODEL.vocab_size
    assert flags(config(top_p=0.9, top_k=9))[room] == 9
    for rules, top_k in (({"top_p": 0.9}, 500), ({"min_p": 0.1, "top_k": 40}, 40)):
        request = request_for(0, wants_support=True, **rules)
        body = request_body(request, [OpenReply()] * 2, [2], "0.1.", 0, support_ids=500)
        expected = {"top_p": 1.0, "min_p": 0.0, **rules, "top_k": top_k}
        assert all(expected.items() <= sampling.items() for sampling in body["sampling_params"])
        assert body["return_sampling_mask"] is True and "return_sampling_mask" not in primer_body(request, "0.1.", 0)


def response(sets: Any, logprobs: Any) -> dict[str, Any]:
    """A response with the tokens 7 and 9, the ids that they were drawn from, and logprobs of these."""
    meta = {
        "finish_reason": {"type": "length"}, "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "output_token_sampling_mask": sets, "output_token_sampling_logprobs": logprobs,
    }
    return {"output_ids": [7, 9], "meta_info": meta}


@pytest.mark.parametrize("of_all_ids", [False, True])
def test_a_response_without_a_set_that_each_token_is_in_is_an_error(of_all_ids: bool) -> None:
    """As from an older server, which ignores that sets are asked for. Logprobs are in the order of the sorted ids."""
    asked: dict[str, Any] = {"may_abort": False, "wants_support": True, "wants_support_logprobs": of_all_ids}
    logprobs = [[-0.25, -1.5], [0.0]] if of_all_ids else [-1.5, 0.0]
    extend_reply(reply := OpenReply(), response([[8, 7], [9]], logprobs), 2, [2], **asked)
    support = reply.reply().support
    assert support is not None and (support.ids.tolist(), support.offsets.tolist()) == ([7, 8, 9], [0, 2, 3])
    assert reply.logprobs == [-1.5, 0.0]
    assert support.logprobs is None if not of_all_ids else support.logprobs.tolist() == [-1.5, -0.25, 0.0]  # type: ignore[union-attr]
    wrong: list[Any] = [None, [[7]], [[7, 8], [8]], [[7], [9, 7], [7]]]
    for sets, values in [*((each, logprobs) for each in wrong), *([([[8, 7], [9]], [[-0.25], [0.0]])] * of_all_ids)]:
        with pytest.raises(AsyncRLError):
            extend_reply(OpenReply(), response(sets, values), 2, [2], **asked)


def test_each_answer_of_a_group_has_its_own_seed_also_after_an_abort() -> None:
    request = request_for(3)
    seeds = [sampling_seed(request, sample) for sample in range(64)]
    assert len(set(seeds)) == 64 and seeds == [sampling_seed(request, sample) for sample in range(64)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(dataclasses.replace(request, seed=2), 0) != seeds[0] != sampling_seed(request_for(4), 0)
    body = request_body(request, [OpenReply(sample=5), OpenReply(tokens=[7], sample=9)], [], "k", 0)
    assert [sampling["sampling_seed"] for sampling in body["sampling_params"]] == [seeds[5], seeds[9]]


def test_no_request_id_begins_with_another() -> None:
    """SGLang aborts all requests whose id begins with the given one."""
    request = request_for(0)
    keys = [f"{group}.{attempt}." for group in (1, 11) for attempt in (0, 1, 10, 11)]
    bodies = [
        b for k in keys for b in (primer_body(request, k, 0), request_body(request, [OpenReply()] * 12, [], k, 0))
    ]
    ids = [rid for body in bodies for rid in body["rid"]]
    assert len(ids) == 8 * 13
    assert [(a, b) for a in ids for b in ids if a != b and b.startswith(a)] == []


EXPERTS = Experts(layers=(1, 3), count=300, per_token=2)


def routed(tokens: int, first: int = 0) -> dict[str, Any]:
    """A response with the experts of so many tokens in four layers, of which two are dense."""
    numbers = first + np.arange(tokens * 8, dtype="<i4")
    return {"meta_info": {"routed_experts": base64.b64encode(numbers.tobytes()).decode()}}


def test_the_experts_in_a_response_are_of_the_layers_that_have_some() -> None:
    routing = read_routing(routed(5), EXPERTS, num_layers=4, num_fed=5)
    assert routing.dtype == np.uint16 and routing.shape == (5, 2, 2)
    assert routing[:2].tolist() == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]
    for wrong, experts in (
        (routed(4), EXPERTS), (routed(6), EXPERTS), ({"meta_info": {}}, EXPERTS), (routed(5, -300), EXPERTS),
        (routed(5, 270), EXPERTS), (routed(5), dataclasses.replace(EXPERTS, per_token=3)),
    ):  # fmt: skip
        with pytest.raises(AsyncRLError):
            read_routing(wrong, experts, num_layers=4, num_fed=5)
    reply = OpenReply(tokens=[7])
    old, new = (read_routing(routed(n, first), EXPERTS, 4, n) for n, first in ((4, 0), (7, 50)))
    reply.add_routing(old)
    reply.add_routing(new)
    np.testing.assert_array_equal(reply.reply().routing, np.concatenate([old, new[4:]]))


def test_experts_are_recorded_and_asked_for_if_the_learner_replays_them(tmp_path: Path) -> None:
    mixture, flag = make_config(save_moe(tmp_path / "moe")), "enable-return-routed-experts"
    assert flags(mixture)[flag] is True
    assert flag not in flags(changed(mixture, rollout={"routing": "ignore"}))
    assert flag not in flags(changed(mixture, model={"path": str(save_bare_model(tmp_path / "dense"))}))
    request = request_for(0)
    assert "return_routed_experts" not in request_body(request, [OpenReply()], [], "k", 0)
    wanting = dataclasses.replace(request, wants_routing=True)
    assert request_body(wanting, [OpenReply()], [], "k", 0)["return_routed_experts"] is True
    assert not wanting.greedy().wants_routing


@pytest.mark.parametrize("finish", [{"type": "abort", "status_code": 503}, {"type": "stop", "matched": "NaN happened"}])
def test_an_answer_that_ended_for_another_reason_is_an_error(finish: dict[str, Any]) -> None:
    versions = [{"version": "3", "start": 0, "end": 1}]
    meta = {"finish_reason": finish, "output_token_logprobs": [[-1.5, 7, None]], "weight_versions": versions}
    with pytest.raises(AsyncRLError):
        extend_reply(OpenReply(), {"output_ids": [7], "meta_info": meta}, 2, [2, 5], ("ab",), may_abort=True)


def test_a_model_without_an_attention_kernel_of_vllm_is_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("rollout_server.engines.vllm.engine.check_environment", lambda config: None)
    wide = save_sharp_model(tmp_path, "tiny-qwen3")
    for folder, is_refused in ((model_folder, True), (wide, False)):
        assert bool(vllm.refuse_run(changed(config("vllm"), model={"path": str(folder)}))) == is_refused


@pytest.mark.processes
@pytest.mark.parametrize(("rollout", "key"), [
    ({"python": sys.executable}, r"rollout\.python"),  # an environment without vLLM
    ({"python": "/nowhere/python"}, r"rollout\.python"),
    ({"temperature": 3.0}, r"rollout\.temperature "),
    ({"top_p": 0.9}, r"rollout\.top_p "),  # its sampler for GPUs filters the logits before it takes logprobs
    ({"engine": "hf", "python": "/usr/bin/python3"}, r"rollout\.python "),
])
def test_what_vllm_can_not_do_is_refused_before_the_start(
    rollout: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=key):
        vllm.refuse_run(config(**{"engine": "vllm", **rollout}))


def test_after_an_abort_each_answer_that_has_begun_gets_a_request_of_its_own_at_vllm() -> None:
    new, begun, other = OpenReply(), OpenReply(tokens=[7]), OpenReply(tokens=[8, 9])
    assert vllm.group_replies([begun, new, other]) == [[new], [begun], [other]]
    assert vllm.group_replies([begun]) == [[begun]]


@pytest.mark.parametrize(("given", "passes"), [(b"Bearer right", True), (b"Bearer wrong", False), (None, False)])
def test_a_request_to_vllm_without_the_key_is_answered_with_401(
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
