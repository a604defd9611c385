"""The SGLang engine starts a server process and sends it two HTTP requests for each group.

The first request, the primer, computes the prompt's KV once. The second samples all replies and finds that KV in the
prefix cache. SGLang's samples depend on how it batches requests, so runs don't repeat exactly unless
`rollout.server_args` has enable-deterministic-inference (GPUs only).
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import AsyncRLError, WeightSyncError
from async_rl.base.host import free_host_bytes
from async_rl.base.models_and_data.experts import Experts, recorded_experts
from async_rl.base.models_and_data.model_folder import forbidden_tokens
from async_rl.base.types import RoutingArray
from rollout_server.engines.base import GenerationRequest, Load
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.http_engine import HttpEngine, OpenReply, cache_key
from rollout_server.engines.sglang.launch import most_support_ids, server_flags, sglang_process


class SGLangEngine(HttpEngine):
    """The `Engine` of rollout.engine=sglang: starts an SGLang server, or uses a running one (rollout.server_urls).
    """

    def __init__(self, config: Config, index: int, log_dir: Path) -> None:
        super().__init__(config, index, log_dir, "SGLang")
        self.experts: Experts | None = None
        """The experts of the model, if their use is recorded."""
        self.support_ids = 0
        """The most ids that the server gives for a token; 0: it gives none."""

    async def open_server(self, model: Any, on_gpu: bool) -> None:
        self.experts = await asyncio.to_thread(recorded_experts, self._config)
        self.num_layers = int(model.num_hidden_layers)
        self.forbidden = await asyncio.to_thread(forbidden_tokens, self._config)
        if url := self._config.rollout.server_url:
            admin = HttpAdmin(self._config, url)
            if self._config.records_support:
                self.support_ids = most_support_ids(self._config, self.vocab_size)
            await asyncio.to_thread(attach_server, admin, self._config, self.support_ids)
            self.url = admin.url
            return
        flags = server_flags(
            self._config, model, on_gpu=on_gpu, free_memory_bytes=free_host_bytes(), seed=self._seed
        )
        self.support_ids = int(flags.get("sampling-mask-max-tokens", 0))
        self.server = sglang_process(self._name, flags, self._log_file, self._config)
        await self.server.start()
        self.url = self.server.url

    async def _extend(self, request: GenerationRequest, replies: list[OpenReply]) -> None:
        # SGLang aborts every request whose id begins with the given text, so no id may begin with another id.
        prefix = f"{request.key}.{next(self._attempts)}."
        priority = self.priority(request)
        stop = self._config.rollout.stop
        bodies = [
            request_body(request, replies, self.end_tokens, prefix, priority, self.forbidden, stop, self.support_ids)
        ]
        if len(replies) > 1:
            bodies.insert(0, primer_body(request, prefix, priority))
        for body in bodies:
            responses = await self.post("/generate", body, body["rid"], request.key)
        for reply, response in zip(replies, responses, strict=True):
            extend_reply(
                reply, response, request.max_tokens, self.end_tokens, stop, may_abort=self.resubmits,
                wants_support=request.wants_support, wants_support_logprobs=request.wants_support_logprobs,
            )
            if self.experts and request.wants_routing and response["output_ids"]:
                num_fed = len(request.prompt.tokens) + len(reply.tokens) - 1
                reply.add_routing(read_routing(response, self.experts, self.num_layers, num_fed))

    def _abort_request(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_request", {"rid": request_id}

    async def load(self) -> Load | None:
        """Return the number of replies running on the server, and its capacity; None: no answer within LOAD_TIMEOUT_S.
        """
        text = await self._get_text("/v1/loads?include=core")
        if text is None:
            return None
        ranks, rollout = json.loads(text)["loads"], self._config.rollout
        running = sum(rank["num_running_reqs"] for rank in ranks)
        slots = sum(rank["max_running_requests"] for rank in ranks)
        slots = min(slots or running, rollout.max_groups_in_flight * rollout.group_size)
        return Load(min(running, slots), slots, sum(rank.get("max_total_num_tokens", 0) for rank in ranks))


def attach_server(admin: HttpAdmin, config: Config, support_ids: int = 0) -> None:
    """Reset a running server: end its requests, load the weights of model.path as version 0, and empty its cache.

    Args:
        support_ids: how many ids of a token's support the server must be able to return; 0: it need not return any.

    Raises:
        ConfigError: the server would tag tokens with wrong versions, can't read stop texts, or returns too few ids.
        WeightSyncError: the server can't be reached, or refuses one of these requests.
    """
    try:
        is_disabled = admin.server_info().get("disable_overlap_schedule")
        check(
            is_disabled is True or config.weight_sync.on_update != "in_place", "rollout.server_urls", admin.url,
            "a server with --disable-overlap-schedule for weight_sync.on_update in_place",
            "Else it tags tokens with versions that did not sample them. Or set weight_sync.on_update: retract.",
        )
        check(
            not (config.rollout.stop and admin.server_info().get("skip_tokenizer_init")), "rollout.server_urls",
            admin.url,
            "a server without --skip-tokenizer-init for rollout.stop", "It has to read the text of its replies.",
        )
        most = admin.server_info().get("sampling_mask_max_tokens", 0) if support_ids else 0
        check(
            most >= support_ids, "rollout.server_urls", admin.url,
            f"a server of SGLang 0.5.21 or newer with --sampling-mask-max-tokens {support_ids} or more",
            f"It gives {most} of the ids that a token was drawn from (algorithm.support replay). Or set "
            f"algorithm.support: ignore{f', or rollout.top_k: {most}' if most else ''}.",
        )
        records = recorded_experts(config) is not None
        check(
            not records or bool(admin.server_info().get("enable_return_routed_experts")), "rollout.server_urls",
            admin.url, "a server with --enable-return-routed-experts for rollout.routing replay",
            "Else it does not say which experts it has used. Or set rollout.routing: ignore.",
        )
        check(
            not records or config.weight_sync.on_update != "retract", "weight_sync.on_update", "retract",
            "another policy with rollout.server_urls, rollout.routing replay and a mixture of experts",
            "After a retraction SGLang returns the experts of its newest weights for all tokens. Or set "
            "rollout.routing: ignore.",
        )
        admin.resume()  # an earlier run may have left the server paused in the middle of a push
        admin.abort_all()
        admin.pause("in_place")
        with suppress(WeightSyncError):  # an earlier run may have ended in the middle of an update
            admin.end_update()
        admin.begin_update()
        admin.load_folder(Path(config.model.path).resolve(), version=0)
        admin.end_update()
        admin.resume()
        admin.flush_when_idle()
        version = admin.served_version()
    except WeightSyncError as error:
        raise WeightSyncError(
            f"rollout.server_urls {admin.url} can't be used: {error}. Is an SGLang server running there?"
        ) from error
    if version != "0":
        raise WeightSyncError(
            f"the server at {admin.url} must serve weight version 0 after its reset, got {version!r}"
        )


def sampling_seed(request: GenerationRequest, sample: int) -> int:
    """Return the random seed of one reply, in 0..2**31 - 1. The replies of a group have different seeds."""
    source = np.random.SeedSequence((request.seed, request.prompt.index, sample))
    return int(source.generate_state(1)[0]) >> 1


def primer_body(request: GenerationRequest, prefix: str, priority: int) -> dict[str, Any]:
    """Return the body of a /generate request that computes the prompt's KV and samples nothing.

    Args:
        prefix: the beginning of the request's id.
        priority: SGLang's scheduler runs lower numbers first, with the flags of `server_flags`.
    """
    return {
        "rid": [f"{prefix}prompt."], "input_ids": [request.prompt.tokens.tolist()],
        "sampling_params": [{"max_new_tokens": 0}], "extra_key": cache_key(request), "priority": priority,
    }


def request_body(
    request: GenerationRequest, replies: list[OpenReply], end_tokens: list[int], prefix: str, priority: int,
    forbidden: Sequence[int] = (), stop: Sequence[str] = (), support_ids: int = 0,
) -> dict[str, Any]:
    """Return the body of one /generate request that samples the tokens that each of `replies` still lacks.

    Args:
        prefix: the beginning of the id of each reply's request.
        priority: as for `primer_body`.
        forbidden: tokens that are not sampled. SGLang adds a bias to their logits, so the logprobs exclude them too.
        stop: texts that end a reply. They need a server with a tokenizer.
        support_ids: the most ids of a token's support that the server returns.
    """
    top_k = request.top_k or -1
    if request.wants_support:  # then SGLang needs a limit
        top_k = min(request.top_k or support_ids, support_ids)
    prompt = request.prompt.tokens.tolist()
    sampling = {  # every parameter that could exclude tokens, even if it has SGLang's default
        "stop_token_ids": end_tokens, "temperature": request.temperature, "top_p": request.top_p, "top_k": top_k,
        "min_p": request.min_p, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        **({"stop": list(stop), "no_stop_trim": True} if stop else {}),
    }
    if forbidden:
        sampling["logit_bias"] = {str(token): -1e9 for token in forbidden}
    return {
        "rid": [f"{prefix}{i}." for i in range(len(replies))],
        "input_ids": [prompt + reply.tokens for reply in replies],
        "sampling_params": [
            {
                **sampling, "max_new_tokens": request.max_tokens - len(reply.tokens),
                "sampling_seed": sampling_seed(request, reply.sample),  # used with deterministic inference only
            }
            for reply in replies
        ],
        **({"return_sampling_mask": True} if request.wants_support else {"return_logprob": True}),
        **({"sampling_logprobs_mode": "support"} if request.wants_support_logprobs else {}),
        **({"return_routed_experts": True} if request.wants_routing else {}),
        "extra_key": cache_key(request), "priority": priority,
    }


def read_routing(response: dict[str, Any], experts: Experts, num_layers: int, num_fed: int) -> RoutingArray:
    """Return the experts that the server reports for each token, [num_fed, layers, k], in the layers with a router.

    Args:
        experts: the model's routers; k is `experts.per_token`.
        num_layers: all layers of the model, with or without a router.
        num_fed: all tokens of prompt and reply except the last, which was not fed.

    Raises:
        AsyncRLError: the response has no experts, too few or too many, or numbers that the model does not have.
    """
    data = base64.b64decode(response["meta_info"].get("routed_experts") or "")
    expected = (num_fed, num_layers, experts.per_token)
    if len(data) != 4 * math.prod(expected):
        raise AsyncRLError(
            f"the rollout server must send the experts of {num_fed} tokens, {num_layers} layers with "
            f"{experts.per_token} each, as 32-bit numbers, got {len(data)} bytes. Set rollout.routing: ignore"
        )
    routing = np.frombuffer(data, "<i4").reshape(expected)[:, list(experts.layers)]
    if routing.min() < 0 or routing.max() >= experts.count:
        raise AsyncRLError(
            f"the rollout server must send experts 0..{experts.count - 1}, got {routing.min()}..{routing.max()}"
        )
    return routing.astype(experts.dtype)


def extend_reply(
    reply: OpenReply, response: dict[str, Any], max_tokens: int, end_tokens: list[int], stop: Sequence[str] = (), *,
    may_abort: bool, wants_support: bool = False, wants_support_logprobs: bool = False,
) -> None:
    """Append the tokens of the server's response to `reply`, and set its finish_reason if it has ended.

    Raises AsyncRLError as OpenReply.extend does.
    """
    meta = response["meta_info"]
    finish = meta["finish_reason"]
    is_end = isinstance(matched := finish.get("matched"), int) or matched in stop  # SGLang also "matches" errors
    failed = finish.get("status_code") or (finish["type"] == "stop" and not is_end)
    if wants_support:
        logprobs, sets = meta.get("output_token_sampling_logprobs") or [], meta.get("output_token_sampling_mask") or []
    else:
        logprobs, sets = [entry[0] for entry in meta.get("output_token_logprobs") or ()], None
    of_ids = None
    if wants_support_logprobs:  # then they are those of all ids
        of_ids = logprobs
        logprobs = [
            values[ids.index(token)] if token in ids and len(values) == len(ids) else None
            for token, ids, values in zip(response["output_ids"], sets or (), of_ids, strict=False)
        ]
    reply.extend(
        response["output_ids"], logprobs, meta.get("weight_versions"), str(finish) if failed else finish["type"],
        sets, of_ids, max_tokens=max_tokens, end_tokens=end_tokens, may_abort=may_abort,
    )
