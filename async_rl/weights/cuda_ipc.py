"""Weights between two processes on one GPU: the server maps the learner's bucket, and no byte passes through the host.

SGLang is told of a bucket by what torch's multiprocessing needs to map its memory, as a pickle: its
`/update_weights_from_tensor` takes nothing else, and lets nothing but tensors in. The learner reads no pickle, and the
configuration keeps this one on loopback. On CPU the same code shares host memory.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from async_rl.weights.base import PushReport, post, start_together
from async_rl.weights.bucketed import BucketPublisher
from async_rl.weights.buckets import Bucket, bucket_num_bytes


class CudaIpcPublisher(BucketPublisher):
    """Learner half, for servers on the learner's own device; the other half is SGLang's."""

    def connect(self) -> None:
        pass  # a bucket carries all that is needed to find it

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> PushReport:
        try:
            return super().send(named_tensors, version)
        finally:
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()  # buckets whose servers have let go of them

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        if bucket.data.is_cuda:
            torch.cuda.current_stream(bucket.data.device).synchronize()  # filled, before another process reads it
        calls = {}
        for name, url in self.servers.items():
            body = {
                "serialized_named_tensors": [shared(bucket)],  # each once: the memory counts who maps it
                "load_format": "flattened_bucket", "flush_cache": False,
            }
            if bucket.is_last:
                body["weight_version"] = str(version)
            calls[name] = partial(post, self.session, url, "/update_weights_from_tensor", body, self.push_limit)
        return start_together(calls, self.push_limit, f"push of version {version}")


def shared(bucket: Bucket) -> str:
    """What one process needs to map the bucket's memory and to find the tensors in it: base64 of a pickle."""
    tensors, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + bucket_num_bytes([dtype], [shape])
        tensors.append(SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=getattr(torch, dtype),
            start_idx=start, end_idx=end, numel=end - start,
        ))
        start = end
    with _shared_by_name():
        payload = ForkingPickler.dumps({"flattened_tensor": bucket.data, "metadata": tensors})
    return base64.b64encode(payload).decode()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Host memory is found by its name: a file descriptor would only go to a child of this process."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
