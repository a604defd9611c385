"""The base of transports that send flat buckets: one bucket is gathered while the one before it is sent."""

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
    """A subclass says how one bucket is sent."""

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        super().__init__(config, engine_urls, rank, device)
        self._buffers: list[Tensor | None] = [None, None]

    @abstractmethod
    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        """Return at once with a function that waits until every server has loaded the bucket."""

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        """While a bucket is sent, the next one is gathered: at most two of them exist."""
        num_bytes = 0
        wait_sent: Callable[[], Any] | None = None
        for bucket in iter_buckets(named_tensors, self.bucket_bytes, self.dtype, self._buffers):
            if wait_sent:
                wait_sent()
            else:  # not before: the first bucket is gathered while the servers still generate
                self.open_update()
            wait_sent = self.start_sending(bucket, version)
            num_bytes += bucket.data.numel()
        if wait_sent:
            wait_sent()
        self.close_update()
        if self.device.type == "cuda":  # training needs the memory; on a CPU allocating it anew would be slow
            self._buffers = [None, None]
        return num_bytes
