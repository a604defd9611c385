"""Weights between two processes on one GPU: the server maps the learner's bucket, and no byte passes through the host.

On a CPU the same code shares host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from async_rl.weights.base import start_together
from async_rl.weights.bucketed import BucketPublisher
from async_rl.weights.buckets import Bucket


class CudaIpcPublisher(BucketPublisher):
    """Learner half, for servers on the learner's own device."""

    def connect(self) -> None:
        pass  # a bucket carries all that is needed to find it

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        try:
            return super().send(named_tensors, version)
        finally:
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()  # frees the buckets that no server maps any more

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        if bucket.data.is_cuda:
            torch.cuda.current_stream(bucket.data.device).synchronize()  # filled, before another process reads it
        label = version if bucket.is_last else None
        calls = self.calls(lambda admin: admin.map_bucket(bucket, label))
        return start_together(calls, self.push_limit, f"push of version {version}")
