"""Batches of random rows."""

from __future__ import annotations

import numpy as np

from async_rl.base.config import Config
from async_rl.base.types import Batch
from rollout_server.engines.base import SampledReply
from tests.kit.engines.replies import request_for
from tests.kit.learner.served_batches import served_batch


def random_batch(config: Config) -> Batch:
    """A batch of rows with random lengths and random tokens, as if a uniform policy had sampled them."""
    rng = np.random.default_rng(0)
    requests = [request_for(index) for index in range(8)]
    rows = []
    for _ in requests:
        lengths = rng.integers(1, config.rollout.max_response_tokens + 1, size=config.rollout.group_size)
        rows.append([
            SampledReply(
                tokens=rng.integers(4, 90, size=length).astype(np.int32),
                logprobs=np.full(length, -4.5, np.float32), versions=np.zeros(length, np.int32), finish_reason="stop",
            )
            for length in lengths.tolist()
        ])
    return served_batch(requests, rows)
