"""The transport between processes on one GPU: the server maps the learner's bucket, and no byte leaves the GPU.

On a CPU the same code shares host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from async_rl.weights.base import start_together
from async_rl.weights.bucket import Bucket
from async_rl.weights.bucket_publisher import BucketPublisher


class CudaIpcPublisher(BucketPublisher):
    """The learner's half of the transport: sends buckets by sharing their memory with servers on the same device."""

    def send(self, staged: Iterator[Bucket], version: int) -> int:
        try:
            return super().send(staged, version)
        finally:
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()  # frees the buckets that no server maps any more

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        if bucket.data.is_cuda:
            torch.cuda.current_stream(bucket.data.device).synchronize()  # the bucket must be filled before it is read
        label = version if bucket.is_last else None
        calls = self.calls(lambda admin: admin.map_bucket(bucket, label))
        return start_together(calls, self.push_limit, f"push of version {version}")
