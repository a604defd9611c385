"""Proof that version tags are true: behaviour logprobs are recomputed under the weights of every version."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from async_rl.base.types import FloatArray, IntArray
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.engines.replies import TOLERANCE, distributions, from_scratch, of_tokens, wrong_sets

TOLD_APART = 0.05
"""The least error of some logprob of a segment under another version's weights."""
MIN_TOKENS = 5
"""The shortest segment in which other weights are sure to be visible."""


def segments(versions: IntArray) -> list[tuple[int, int, int]]:
    """(version, first token, end) of each run of equal versions."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[a]), a, b) for a, b in itertools.pairwise(cuts)]


def over_mixed_kv(
    models: Mapping[int, PreTrainedModel], prompt: IntArray, reply: SampledReply, temperature: float,
    other: int | None = None,
) -> FloatArray:
    """Logprobs [T] as engines that keep KV compute them, over the support of each token if it was recorded."""
    whole = distributions_over_mixed_kv(models, prompt, reply, temperature, other)
    return of_tokens(whole, reply.tokens, reply.support)


def distributions_over_mixed_kv(
    models: Mapping[int, PreTrainedModel], prompt: IntArray, reply: SampledReply, temperature: float,
    other: int | None = None,
) -> torch.Tensor:
    """Logprobs [T, V] as engines that keep KV compute them: each segment by its version, on KV of the versions before.

    The forward that samples token i + 1 reads token i and computes its KV. With `other` every segment is computed by
    that version's weights instead, on the same KV.
    """
    cache, parts = DynamicCache(), []
    sequence = np.concatenate([prompt, reply.tokens])
    for version, start, end in segments(reply.versions):
        first = cache.get_seq_length()
        fed = sequence[first : len(prompt) + end - 1]
        if other is not None:
            parts.append(_continue(models[other], _copy(cache), fed, end - start, temperature))
            _continue(models[version], cache, fed, end - start, temperature)
        else:
            parts.append(_continue(models[version], cache, fed, end - start, temperature))
    return torch.cat(parts)


def check_tags(
    models: Mapping[int, PreTrainedModel], prompt: IntArray, reply: SampledReply, temperature: float, *,
    keeps_kv: bool, tolerance: float = TOLERANCE,
) -> float:
    """Assert that behaviour logprobs are those of the tagged version and of no other.

    Args:
        keeps_kv: compare over mixed KV; otherwise from scratch.
        tolerance: of logits, in nats; logprobs are of the logits divided by the temperature.

    Returns:
        The mean difference to a recompute from scratch, over tokens sampled after the first update.
    """
    fresh = {
        v: from_scratch(model, prompt, reply.tokens, temperature, support=reply.support) for v, model in models.items()
    }
    tagged = np.concatenate([fresh[v][a:b] for v, a, b in segments(reply.versions)])
    later = reply.versions != reply.versions[0]
    mismatch = np.abs(reply.logprobs - tagged)[later]
    if keeps_kv:
        tagged = over_mixed_kv(models, prompt, reply, temperature)
        fresh = {v: over_mixed_kv(models, prompt, reply, temperature, other=v) for v in models}
    np.testing.assert_allclose(reply.logprobs, tagged, atol=tolerance / temperature, rtol=0)
    for version, start, end in segments(reply.versions):
        for other in models:
            if other != version and end - start >= MIN_TOKENS:
                error = np.abs(reply.logprobs - fresh[other])[start:end].max()
                assert error > TOLD_APART, f"tokens {start}..{end} of version {version} could be of {other}: {error}"
    return float(mismatch.mean()) if later.any() else 0.0


def check_supports(
    models: Mapping[int, PreTrainedModel], request: GenerationRequest, reply: SampledReply, *, keeps_kv: bool
) -> None:
    """Assert that the ids of each token are those that the request's sampling keeps under its version's weights."""
    prompt, temperature = request.prompt.tokens, request.temperature
    if not request.wants_support:
        assert reply.support is None
        return
    assert reply.support is not None
    if keeps_kv:
        whole = distributions_over_mixed_kv(models, prompt, reply, temperature)
    else:
        fresh = {v: distributions(models[v], prompt, reply.tokens, temperature) for v in set(reply.versions.tolist())}
        whole = torch.cat([fresh[v][a:b] for v, a, b in segments(reply.versions)])
    assert wrong_sets(whole, reply.support, request.sampling) == []


def _continue(
    model: PreTrainedModel, cache: DynamicCache, fed: IntArray, size: int, temperature: float
) -> torch.Tensor:
    """Extend the cache by the tokens `fed`; return the logprobs [size, V] that the last of them predict."""
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(fed).long()[None], past_key_values=cache, use_cache=True)
    return torch.log_softmax(output.logits[0, -size:].float() / temperature, dim=-1)


def _copy(cache: DynamicCache) -> DynamicCache:
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copied.update(layer.keys.clone(), layer.values.clone(), index)
    return copied
