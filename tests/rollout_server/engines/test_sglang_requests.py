"""The parts of the SGLang engine that need no SGLang: flags, requests, failed responses, the start of a process."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from async_rl.base.config import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    RolloutConfig,
    StalenessConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.models_and_data.experts import Experts
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
from rollout_server.engines.sglang.launch import server_environment, server_flags
from tests.kit.configs import changed, make_config
from tests.kit.engines.replies import request_for
from tests.kit.models import save_bare_model
from tests.kit.tiny_moe import save_moe

MODEL = SimpleNamespace(
    max_position_embeddings=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    hidden_size=96, vocab_size=1000,
)


def config(**rollout: Any) -> Config:
    return make_config(
        task={"max_prompt_tokens": 100}, rollout={"group_size": 4, "max_response_tokens": 50, **rollout},
        learner={"prompts_per_step": 8}, eval={"num_prompts": 10, "samples_per_prompt": 2},
    )


def flags(config: Config, *, on_gpu: bool = False, free_memory_bytes: int = 2**33) -> dict[str, Any]:
    return server_flags(config, MODEL, on_gpu=on_gpu, free_memory_bytes=free_memory_bytes, seed=0)


def test_the_kv_cache_holds_all_that_can_be_in_flight_in_a_quarter_of_memory() -> None:
    # (0 + 1) * 8 groups of 4, and 10 * 2 of the evaluation, of 100 + 50 + 8 tokens each
    chosen = flags(config())
    assert chosen["max-total-tokens"] == (8 * 4 + 20) * 158
    assert chosen["model-path"] == str(Path.cwd() / "none")  # relative to the driver's folder
    # a token takes 2 * 2 layers * 2 heads * 24 wide * 4 bytes = 768
    assert flags(config(), free_memory_bytes=768 * 4 * 1000)["max-total-tokens"] == 1000
    assert flags(config(), free_memory_bytes=0)["max-total-tokens"] == 150 + 8  # one rollout


def test_a_gpu_server_has_its_memory_share_and_graphs_up_to_the_replies_in_flight() -> None:
    chosen = flags(config(gpu_memory_utilization=0.4), on_gpu=True)
    assert (chosen["mem-fraction-static"], chosen["dtype"]) == (0.4, "bfloat16")
    assert chosen["cuda-graph-max-bs-decode"] == 8 * 4 + 20
    assert not {"max-total-tokens", "device", "enable-memory-saver"} & set(chosen)
    many = dataclasses.replace(config(), staleness=StalenessConfig(max=60))
    assert flags(many, on_gpu=True)["cuda-graph-max-bs-decode"] == 1024


@pytest.mark.parametrize(("dtype", "computes_float32"), [("float32", True), ("auto", False)])
def test_a_gpu_server_computes_float32_in_full_precision(dtype: str, computes_float32: bool) -> None:
    typed = dataclasses.replace(config(), model=ModelConfig(path="m", dtype=dtype))  # type: ignore[arg-type]
    chosen = flags(typed, on_gpu=True)
    environment = server_environment(typed, chosen)
    assert ("TRITON_F32_DEFAULT" in environment) == computes_float32
    # SGLang's kernels for norms and activations on GPUs have no float32
    assert ("SGLANG_FORCE_FUSED_OP_BACKEND" in environment) == (computes_float32 and "mem-fraction-static" in chosen)
    assert chosen.get("attention-backend") == ("triton" if computes_float32 else None)


def test_the_processes_of_a_server_meet_at_another_port_of_its_range(tmp_path: Path) -> None:
    def command(ports: str, **server_args: Any) -> list[str]:
        typed = dataclasses.replace(config(server_args=server_args), network=NetworkConfig(ports=ports))
        process = launch.sglang_process("server 0", flags(typed), tmp_path / "log", typed)
        return list(process.command(21001))

    def words(command: list[str], flag: str) -> list[str]:
        return [after for before, after in itertools.pairwise(command) if before == f"--{flag}"]

    for _ in range(8):
        bounded = command("21001-21002")
        assert (words(bounded, "port"), words(bounded, "nccl-port")) == (["21001"], ["21002"])
    assert (words(command(""), "port"), words(command(""), "nccl-port")) == (["21001"], [])
    assert words(command("21001-21009", nccl_port=30000), "nccl-port") == ["30000"]


@pytest.mark.parametrize("on_update", ["in_place", "retract"])
def test_overlap_is_off_on_cpus_and_where_a_pause_cuts_speculation(on_update: str) -> None:
    pausing = dataclasses.replace(config(), weight_sync=WeightSyncConfig(on_update=on_update))  # type: ignore[arg-type]
    speculating = dataclasses.replace(pausing, rollout=RolloutConfig(server_args={"speculative_algorithm": "EAGLE"}))
    assert flags(pausing)["disable-overlap-schedule"]
    assert not flags(pausing, on_gpu=True)["disable-overlap-schedule"]
    assert flags(speculating, on_gpu=True)["disable-overlap-schedule"] == (on_update == "in_place")


@pytest.mark.parametrize(("policy", "has_priorities"), [("", True), ("lpm", False)])
def test_requests_wait_by_their_priority_where_sglang_can_and_none_is_preempted(
    policy: str, has_priorities: bool
) -> None:
    chosen = flags(config(server_args={"schedule_policy": policy} if policy else {}))
    ordering = {"enable-priority-scheduling", "schedule-low-priority-values-first", "disable-priority-preemption"}
    assert {name for name in ordering if chosen.get(name)} == (ordering if has_priorities else set())
    assert chosen.get("default-priority-value") == (0 if has_priorities else None)


def test_a_users_flags_replace_defaults_except_those_the_pipeline_needs() -> None:
    chosen = flags(config(server_args={"log_level": "info", "max-running-requests": 7}))
    assert (chosen["log-level"], chosen["max-running-requests"]) == ("info", 7)
    with pytest.raises(ConfigError, match=r"^rollout\.server_args "):
        config(server_args={"port": 30000})


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
    monkeypatch.setenv("PATH", "/usr/bin")
    shared = dataclasses.replace(
        config(), placement=PlacementConfig(colocated=True), staleness=StalenessConfig(max=0 if in_turns else 1)
    )
    chosen = flags(shared, on_gpu=True)
    assert chosen.get("enable-memory-saver", False) == in_turns
    environment = server_environment(shared, chosen)
    assert environment["LD_LIBRARY_PATH"] == (f"/mine:{tmp_path}/nvidia/cu13/lib" if in_turns else "/mine")
    assert ("expandable_segments" in environment["PYTORCH_ALLOC_CONF"]) != in_turns
    assert environment["PYTORCH_ALLOC_CONF"].startswith("max_split_size_mb:128")
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"  # programs of an environment not activated


def test_only_the_caller_limits_the_time_of_generate(tmp_path: Path) -> None:
    """The worker enforces timeouts.generate_s. With a second limit in the engine either error could appear."""
    limited = dataclasses.replace(config(), timeouts=TimeoutsConfig(generate_s=0.05))

    async def wait_for_a_mute_server(url: str) -> None:
        engine = SGLangEngine(limited, 0, tmp_path)
        engine.url, engine.vocab_size, engine.end_tokens, engine.forbidden = url, 100, [], []
        async with aiohttp.ClientSession() as engine.session:
            await asyncio.wait_for(engine.generate(request_for(0)), 1.0)

    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(TimeoutError) as caught:
        asyncio.run(wait_for_a_mute_server(f"http://127.0.0.1:{mute.getsockname()[1]}"))
    assert not isinstance(caught.value, AsyncRLError)


def test_a_request_asks_for_the_full_support_of_the_distribution() -> None:
    body = request_body(request_for(0, temperature=0.7, max_tokens=9), [OpenReply()] * 3, [2, 5], "0.1.", 4)
    expected = {"temperature": 0.7, "max_new_tokens": 9, "stop_token_ids": [2, 5]}
    full_support = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert len(body["sampling_params"]) == 3
    assert all((expected | full_support).items() <= sampling.items() for sampling in body["sampling_params"])
    assert body["return_logprob"] and body["extra_key"] == "training-0" and body["rid"][0] == "0.1.0."
    assert body["priority"] == primer_body(request_for(0), "0.1.", 4)["priority"] == 4


@pytest.mark.parametrize(("rules", "top_k"), [({"top_p": 0.9}, 500), ({"min_p": 0.1, "top_k": 40}, 40)])
def test_a_request_for_supports_has_a_finite_top_k_and_its_primer_asks_for_none(
    rules: dict[str, float], top_k: int
) -> None:
    request = request_for(0, wants_support=True, **rules)
    body = request_body(request, [OpenReply()] * 2, [2], "0.1.", 0, support_ids=500)
    expected = {"top_p": 1.0, "min_p": 0.0, **rules, "top_k": top_k}
    assert all(expected.items() <= sampling.items() for sampling in body["sampling_params"])
    assert body["return_sampling_mask"] is True
    assert "return_sampling_mask" not in primer_body(request, "0.1.", 0)
    without = request_body(dataclasses.replace(request, wants_support=False), [OpenReply()], [2], "0.1.", 0)
    assert "return_sampling_mask" not in without and without["return_logprob"]


@pytest.mark.parametrize("sets", [None, [[7]], [[7, 8], [8]], [[7], [9, 7], [7]]])
def test_a_response_without_a_set_that_each_token_is_in_is_an_error(sets: list[list[int]] | None) -> None:
    """As from an older server, which ignores that sets are asked for."""
    meta = {
        "finish_reason": {"type": "length"}, "output_token_sampling_logprobs": [-1.0, -0.5],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    response = {"output_ids": [7, 9], "meta_info": {**meta, "output_token_sampling_mask": sets}}
    with pytest.raises(AsyncRLError, match="drawn from"):
        extend_reply(OpenReply(), response, 2, [2], may_abort=False, wants_support=True)
    reply, good = OpenReply(), {**meta, "output_token_sampling_mask": [[8, 7], [9]]}
    extend_reply(reply, {"output_ids": [7, 9], "meta_info": good}, 2, [2], may_abort=False, wants_support=True)
    support = reply.reply().support
    assert support is not None and (support.ids.tolist(), support.offsets.tolist()) == ([7, 8, 9], [0, 2, 3])
    assert reply.logprobs == [-1.0, -0.5]


def test_logprobs_of_all_ids_are_asked_for_and_kept_in_the_order_of_the_ids() -> None:
    request = request_for(0, wants_support=True, wants_support_logprobs=True, top_k=4)
    body = request_body(request, [OpenReply()], [2], "0.1.", 0, support_ids=4)
    assert body["sampling_logprobs_mode"] == "support"
    reply = OpenReply()
    meta = {
        "finish_reason": {"type": "length"}, "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "output_token_sampling_mask": [[8, 7], [9]], "output_token_sampling_logprobs": [[-0.25, -1.5], [0.0]],
    }
    asked = {"may_abort": False, "wants_support": True, "wants_support_logprobs": True}
    extend_reply(reply, {"output_ids": [7, 9], "meta_info": meta}, 2, [2], **asked)
    support = reply.reply().support
    assert support is not None and support.logprobs is not None and reply.logprobs == [-1.5, 0.0]
    assert (support.ids.tolist(), support.logprobs.tolist()) == ([7, 8, 9], [-1.5, -0.25, 0.0])
    short = {**meta, "output_token_sampling_logprobs": [[-0.25], [0.0]]}
    with pytest.raises(AsyncRLError, match="one logprob"):
        extend_reply(OpenReply(), {"output_ids": [7, 9], "meta_info": short}, 2, [2], **asked)


def test_a_server_has_room_for_all_ids_that_a_token_may_be_drawn_from() -> None:
    assert "sampling-mask-max-tokens" not in flags(config())
    assert flags(config(top_p=0.9))["sampling-mask-max-tokens"] == MODEL.vocab_size
    assert flags(config(top_p=0.9, top_k=9))["sampling-mask-max-tokens"] == 9
    ignoring = dataclasses.replace(config(top_p=0.9), algorithm=AlgorithmConfig(support="ignore"))
    assert "sampling-mask-max-tokens" not in flags(ignoring)


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


def test_the_rest_of_an_aborted_answer_is_requested_anew() -> None:
    request = request_for(0, max_tokens=4)
    body = request_body(request, [OpenReply(tokens=[7, 8])], [2, 5], "k", 0)
    assert body["input_ids"] == [[*request.prompt.tokens.tolist(), 7, 8]]
    assert body["sampling_params"][0]["max_new_tokens"] == 2


EXPERTS = Experts(layers=(1, 3), count=300, per_token=2)


def routed(tokens: int, first: int = 0) -> dict[str, Any]:
    """A response with the experts of so many tokens in four layers, of which two are dense."""
    numbers = first + np.arange(tokens * 8, dtype="<i4")
    return {"meta_info": {"routed_experts": base64.b64encode(numbers.tobytes()).decode()}}


def test_the_experts_in_a_response_are_those_of_the_layers_that_have_some() -> None:
    routing = read_routing(routed(5), EXPERTS, num_layers=4, num_fed=5)
    assert routing.dtype == np.uint16 and routing.shape == (5, 2, 2)
    assert routing[:2].tolist() == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]
    for wrong, experts in (
        (routed(4), EXPERTS), (routed(6), EXPERTS), ({"meta_info": {}}, EXPERTS), (routed(5, -300), EXPERTS),
        (routed(5, 270), EXPERTS), (routed(5), dataclasses.replace(EXPERTS, per_token=3)),
    ):  # fmt: skip
        with pytest.raises(AsyncRLError):
            read_routing(wrong, experts, num_layers=4, num_fed=5)


def test_a_server_records_experts_if_the_model_has_some_and_the_learner_replays_them(tmp_path: Path) -> None:
    mixture = make_config(save_moe(tmp_path / "moe"))
    flag = "enable-return-routed-experts"
    assert flags(mixture)[flag] is True
    assert flag not in flags(changed(mixture, rollout={"routing": "ignore"}))
    assert flag not in flags(changed(mixture, model={"path": str(save_bare_model(tmp_path / "dense"))}))


def test_only_requests_that_want_experts_ask_for_them_and_keep_the_first() -> None:
    request = request_for(0)
    assert "return_routed_experts" not in request_body(request, [OpenReply()], [], "k", 0)
    wanting = dataclasses.replace(request, wants_routing=True)
    assert request_body(wanting, [OpenReply()], [], "k", 0)["return_routed_experts"] is True
    assert "return_routed_experts" not in primer_body(wanting, "k", 0)
    assert not wanting.greedy().wants_routing
    reply = OpenReply(tokens=[7])
    old, new = (read_routing(routed(n, first), EXPERTS, 4, n) for n, first in ((4, 0), (7, 50)))
    reply.add_routing(old)
    reply.add_routing(new)
    np.testing.assert_array_equal(reply.reply().routing, np.concatenate([old, new[4:]]))


@pytest.mark.parametrize("finish", [{"type": "abort", "status_code": 503}, {"type": "stop", "matched": "NaN happened"}])
def test_an_answer_that_ended_for_another_reason_is_an_error(finish: dict[str, Any]) -> None:
    versions = [{"version": "3", "start": 0, "end": 1}]
    meta = {"finish_reason": finish, "output_token_logprobs": [[-1.5, 7, None]], "weight_versions": versions}
    with pytest.raises(AsyncRLError, match=str(list(finish.values())[-1])):
        extend_reply(OpenReply(), {"output_ids": [7], "meta_info": meta}, 2, [2, 5], ("ab",), may_abort=True)
