"""The base class of transports that send flat buckets: it gathers one bucket while the one before it is sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.weights.base import WeightPublisher
from async_rl.weights.buckets import Bucket, iter_buckets


class BucketPublisher(WeightPublisher):
    """A WeightPublisher that sends weights bucket by bucket. A subclass defines how one bucket is sent."""

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        super().__init__(config, engine_urls, rank, device)
        self._buffers: list[Tensor | None] = [None, None]

    @abstractmethod
    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        """Start to send `bucket`; returns at once a function that waits until every server has loaded it."""

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        """Send all weights in buckets; returns their bytes. The next bucket is gathered while one is sent."""
        num_bytes = 0
        wait_sent: Callable[[], Any] | None = None
        for bucket in iter_buckets(named_tensors, self.bucket_bytes, self.dtype, self._buffers):
            if wait_sent:
                wait_sent()
            else:  # the servers have generated while the first bucket was gathered
                self.open_update()
            wait_sent = self.start_sending(bucket, version)
            num_bytes += bucket.data.numel()
        if wait_sent:
            wait_sent()
        self.close_update()
        if self.device.type == "cuda":  # training needs the memory; on a CPU allocating it again would be slow
            self._buffers = [None, None]
        return num_bytes
