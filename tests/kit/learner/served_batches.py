"""Batches of the rows of a server, and the learner's logprobs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from async_rl.base.config import Config, WeightSyncConfig
from async_rl.base.types import Batch
from learner.algorithms.advantages import batch_advantages
from learner.loop.updater import Updater
from rollout_server.engines.base import GenerationRequest, SampledReply
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import generate, request_for
from tests.kit.groups import batch_of, make_group, make_row

Note = Callable[..., None]
FLOAT32_OPEN = (1e-3, 1e-2)
"""Largest mean and p99 of |difference of logprobs| between two ways to compute them in float32."""


def generated(server: EngineInThread, config: Config, groups: int = 8) -> Batch:
    """Generate `groups` groups of config.rollout.group_size rows at the same time."""
    requests = [
        request_for(index, n=config.rollout.group_size, max_tokens=config.rollout.max_response_tokens)
        for index in range(groups)
    ]
    return served_batch(requests, generate(server, *requests, timeout_s=300.0))


def served_batch(requests: Sequence[GenerationRequest], replies: Sequence[Sequence[SampledReply]]) -> Batch:
    """The replies as groups of version 0, with rewards of 0 and 1 by turns."""
    return batch_of(*(
        make_group(
            request.group_id, request.prompt.tokens, temperature=request.temperature, rows=[
                make_row(reply.tokens, reply.logprobs, float(number % 2), finish_reason=reply.finish_reason)
                for number, reply in enumerate(of_request)
            ],
        )
        for request, of_request in zip(requests, replies, strict=True)
    ))


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


def rounded(updater: Updater, batch: Batch) -> np.ndarray:
    """|difference| of the learner's logprobs from those of the same weights in float32: what its compute type costs."""
    exact = Updater(
        changed(updater.config, model={"dtype": "float32"}, weight_sync=WeightSyncConfig()), updater.device
    )
    updater.policy.reshard()  # type: ignore[operator] # a forward pass without a backward leaves the root gathered
    with torch.no_grad():
        for parameter, ours in zip(exact.policy.parameters(), updater.policy.parameters(), strict=True):
            parameter.to_local().copy_(ours.to_local())  # type: ignore[attr-defined]
    return np.abs(learner_logprobs(updater, batch) - learner_logprobs(exact, batch))


def check_agreement(what: str, updater: Updater, batch: Batch, note: Note) -> None:
    """Assert that the behaviour logprobs are the learner's, up to twice what bfloat16 costs the learner itself."""
    dtype = str(updater.dtype).removeprefix("torch.")
    differences = behaviour_logprobs(batch) - learner_logprobs(updater, batch)
    mean, p99 = FLOAT32_OPEN
    if dtype == "bfloat16":
        cost = rounded(updater, batch)
        mean, p99 = 2 * float(cost.mean()), 2 * float(np.quantile(cost, 0.99))
    note(what, differences, dtype=dtype, open_mean=mean, open_p99=p99)
    assert np.abs(differences).mean() < mean
    assert np.quantile(np.abs(differences), 0.99) < p99
