"""Batches of the rows of a server, and the learner's logprobs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from async_rl.config import Config
from async_rl.types import Batch, Group, Row
from learner.algorithms.token_advantages import batch_advantages
from learner.updater import Updater
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import generate, request_for

Note = Callable[..., None]
OPEN = {"float32": (1e-3, 1e-2), "bfloat16": (0.05, 0.3)}
"""Largest mean and p99 of |difference of logprobs| between two ways to compute them, by compute type."""


def generated(server: EngineInThread, config: Config, groups: int = 8) -> Batch:
    """Generate `groups` groups of config.rollout.group_size rows at the same time."""
    requests = [
        request_for(index, n=config.rollout.group_size, max_tokens=config.rollout.max_response_tokens)
        for index in range(groups)
    ]
    return batch_of(requests, generate(server, *requests, timeout_s=300.0))


def batch_of(requests: Sequence[GenerationRequest], replies: Sequence[Sequence[SampledReply]]) -> Batch:
    groups = []
    for request, of_request in zip(requests, replies, strict=True):
        rows = tuple(
            Row(
                tokens=c.tokens, logprobs=c.logprobs, versions=np.zeros_like(c.versions),
                mask=np.ones(len(c.tokens), bool), reward=float(number % 2), finish_reason=c.finish_reason,
            )
            for number, c in enumerate(of_request)
        )
        groups.append(Group(
            group_id=request.group_id, prompt_index=request.prompt.index, start_version=0,
            temperature=request.temperature, prompt_tokens=request.prompt.tokens, rows=rows, duration_s=1.0,
        ))
    return Batch(version=0, groups=tuple(groups), finished_versions=(0,) * len(groups))


def behaviour_logprobs(batch: Batch) -> np.ndarray:
    return np.concatenate([row.logprobs for group in batch.groups for row in group.rows])


def learner_logprobs(updater: Updater, batch: Batch) -> np.ndarray:
    """Logprobs as the learner computes them in a step, in the order of `behaviour_logprobs`."""
    (minibatch,) = updater.pack(batch, batch_advantages(updater.config, batch))
    found = {}
    for micro in minibatch.micro_batches:
        with torch.no_grad():
            parts = updater.policy(micro.inputs)[0].split(micro.response.lengths)
        found |= {row: part.float().cpu().numpy() for row, part in zip(micro.rows, parts, strict=True)}
    return np.concatenate([found[row] for row in sorted(found)])
