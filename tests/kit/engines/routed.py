"""The experts that an engine must have used for each token, by transformers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from async_rl.base.types import Group, IntArray, RoutingArray, Row
from rollout_server.engines.base import SampledReply
from tests.kit.engines.tags import segments


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

    For each layer it appends [N]: by how much the least probable expert that is used is less probable than the most
    probable one that is not, by the router of the model; 0 if it is not.
    """
    lags: list[Tensor] = []

    def use(layer: int) -> Any:
        experts = torch.from_numpy(routing[:, layer].astype(np.int64))

        def hook(router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            probs = output[0].float().softmax(-1)
            used = probs.gather(1, experts)
            lags.append((probs.scatter(1, experts, -1.0).amax(1) - used.amin(1)).clamp(min=0))
            scores = used / used.sum(-1, keepdim=True) if router.norm_topk_prob else used
            return output[0], scores.to(output[1].dtype), experts

        return hook

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(use(layer)) for layer, router in enumerate(routers)]
    try:
        yield lags
    finally:
        for hook in hooks:
            hook.remove()


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
