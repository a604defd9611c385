"""The base class of transports that send weights bucket by bucket."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.weights.base import WeightPublisher
from async_rl.weights.bucket import Bucket, iter_buckets


class BucketPublisher(WeightPublisher):
    """A WeightPublisher that sends weights bucket by bucket. A subclass defines how one bucket is sent."""

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        super().__init__(config, engine_urls, rank, device)
        self._buffers: list[Tensor | None] = [None, None]

    @abstractmethod
    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        """Start to send `bucket`; returns at once a function that waits until every server has received it."""

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> Iterator[Bucket]:
        """Gather the first bucket, and return it with those that follow, which are gathered when they are needed."""
        buckets = iter_buckets(named_tensors, self.bucket_bytes, self.dtype, self._buffers)
        return itertools.chain(list(itertools.islice(buckets, 1)), buckets)

    def send(self, staged: Iterator[Bucket], version: int) -> int:
        """Send all weights in buckets, gathering one while the one before is sent; returns the number of bytes."""
        num_bytes = 0
        wait_sent: Callable[[], Any] | None = None
        for bucket in staged:
            if wait_sent:
                wait_sent()
            wait_sent = self.start_sending(bucket, version)
            num_bytes += bucket.data.numel()
        if wait_sent:
            wait_sent()
        if self.device.type == "cuda":  # training needs the memory; on a CPU allocating it again would be slow
            self._buffers = [None, None]
        return num_bytes
