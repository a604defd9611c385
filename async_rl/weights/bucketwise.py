"""What the transports that send flat buckets share: one bucket is gathered while the one before it is on its way."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from async_rl.weights.buckets import Bucket, iter_buckets
from async_rl.weights.publisher import PushReport, WeightPublisher


class BucketPublisher(WeightPublisher):
    @abstractmethod
    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        """Returns at once; what it returns waits until every server has loaded the bucket."""

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> PushReport:
        """While a bucket is sent, the next one is gathered: two of them are alive at most."""
        start_s = time.time()
        num_bytes = 0
        wait_sent: Callable[[], Any] | None = None
        for bucket in iter_buckets(named_tensors, self.bucket_bytes, self.dtype):
            if wait_sent:
                wait_sent()
            else:  # only now: the first bucket is gathered while the servers still generate
                self.open_update()
            wait_sent = self.start_sending(bucket, version)
            num_bytes += bucket.data.numel()
        if wait_sent:
            wait_sent()
        self.close_update()
        return self.report(start_s, num_bytes)
