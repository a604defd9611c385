"""The experts that an engine must have used for each token, by transformers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from async_rl.base.types import FloatArray, Group, IntArray, RoutingArray, Row
from rollout_server.engines.base import SampledReply
from tests.kit.engines.tags import segments

TIE = 1e-5
"""The difference of two probabilities of a router below which rounding decides, and another batch rounds otherwise."""


def experts_as_sampled(
    models: Mapping[int, Any], prompt: IntArray, reply: SampledReply, keeps_kv: bool, known: RoutingArray | None = None
) -> RoutingArray:
    """The experts [P + T - 1, layers, k] of the forward pass that fed each token first, best first.

    Args:
        models: by version.
        keeps_kv: each token is fed once, by the version that sampled the next one, over the KV that is there. Otherwise
            all of it is computed anew at each change of the version.
        known: of the first tokens of the prompt, which were fed before this reply.
    """
    tokens = torch.from_numpy(np.concatenate([prompt, reply.tokens])).long()
    cache, first = DynamicCache(), torch.zeros(0)
    for version, _, end in segments(reply.versions):
        if not keeps_kv:
            cache = DynamicCache()
        fed = cache.get_seq_length()
        with torch.no_grad(), _chosen_by(models[version]) as chosen:
            models[version](input_ids=tokens[None, fed : len(prompt) + end - 1], past_key_values=cache, use_cache=True)
        experts = torch.stack(chosen, 1)
        first = torch.cat([first, experts[len(first) - fed :]]) if len(first) else experts
    routing = first.numpy()
    if known is not None:
        routing[: len(known)] = known
    return routing


@contextmanager
def _chosen_by(model: Any) -> Iterator[list[Tensor]]:
    """Inside the `with` block a forward pass appends the experts of each layer, as its router returns them."""
    chosen: list[Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _m, _i, output: chosen.append(output[2])) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def using(model: Any, routing: RoutingArray) -> Iterator[list[Tensor]]:
    """Inside the `with` block a forward pass of N tokens uses the experts `routing` [N, layers, k] of a Qwen3-MoE.

    Rows of -1 use those that the model's router chooses. For each layer the pass appends its lags [N]: by how much some
    expert is less probable to the router than the next in `routing`, or the last than one that is not used. It is 0
    if the router would choose the same, best first.
    """
    lags: list[Tensor] = []

    def use(layer: int) -> Any:
        experts = torch.from_numpy(routing[:, layer].astype(np.int64))

        def hook(router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            probs, used = output[0].float().softmax(-1), torch.where(experts < 0, output[2], experts)
            scores, unused = probs.gather(1, used), probs.scatter(1, used, -1.0).amax(1, keepdim=True)
            lags.append(torch.cat([scores, unused], 1).diff().amax(1).clamp(min=0))
            weights = scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores
            return output[0], weights.to(output[1].dtype), used

        return hook

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(use(layer)) for layer, router in enumerate(routers)]
    try:
        yield lags
    finally:
        for hook in hooks:
            hook.remove()


def replayed(
    models: Mapping[int, Any], prompt: IntArray, reply: SampledReply, temperature: float, keeps_kv: bool
) -> tuple[Tensor, FloatArray]:
    """What a reply was sampled from, by transformers with the experts that the engine has recorded for it.

    Args:
        keeps_kv: as for `experts_as_sampled`. Otherwise tokens are computed anew with experts of the newest weights.

    Returns:
        Logprobs [T, V] of all tokens where those of the reply were sampled, and the largest lag [P + T - 1] of each
        fed token's experts over the layers, see `using`. Lags up to TIE are of no meaning.
    """
    assert reply.routing is not None
    tokens = torch.from_numpy(np.concatenate([prompt, reply.tokens])).long()
    cache, sampled_from, lags = DynamicCache(), [], []
    for version, start, end in segments(reply.versions):
        if not keeps_kv:
            cache = DynamicCache()
        cached, stop = cache.get_seq_length(), len(prompt) + end - 1
        first = len(prompt) + start - 1 if start else 0
        routing = reply.routing[cached:stop].astype(np.int64)
        routing[: first - cached] = -1
        with torch.no_grad(), using(models[version], routing) as of_layers:
            fed = models[version](input_ids=tokens[None, cached:stop], past_key_values=cache, use_cache=True)
        sampled_from.append(torch.log_softmax(fed.logits[0, start - end :].float() / temperature, dim=-1))
        lags.append(torch.stack(of_layers).amax(0)[first - cached :])
    return torch.cat(sampled_from), torch.cat(lags).numpy()


def row_experts(models: Mapping[int, Any], group: Group, row: Row, keeps_kv: bool) -> RoutingArray:
    """The experts [P + T - 1, layers, k] that a row must have whose replies are all trained in it."""
    tokens = np.concatenate([group.prompt_tokens, row.tokens])
    mask = np.concatenate([np.zeros(len(group.prompt_tokens), np.bool_), row.mask])
    versions = np.concatenate([np.zeros(len(group.prompt_tokens), np.int32), row.versions])
    edges = np.flatnonzero(np.diff(mask)) + 1
    known = None
    for start, end in zip(edges[::2], [*edges[1::2], len(tokens)], strict=True):
        reply = SampledReply(
            tokens=tokens[start:end], logprobs=np.zeros(0, np.float32), versions=versions[start:end], finish_reason=""
        )
        known = experts_as_sampled(models, tokens[:start], reply, keeps_kv, known)
    assert known is not None
    return known
