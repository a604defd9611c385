"""Sharing the memory of a bucket of weights with an SGLang server on the same GPU or, on a CPU, on the same host."""

from __future__ import annotations

import base64
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing as multiprocessing

from async_rl.weights.buckets import Bucket, bucket_num_bytes

_sharing = threading.Lock()
"""Held while a bucket is shared: the way in which torch shares memory is a setting of the whole process."""


def share_bucket(bucket: Bucket) -> str:
    """The pickle, in base64, by which one SGLang server maps the bucket's memory and finds the tensors in it.

    SGLang takes nothing else, and lets nothing but tensors in. This process reads no pickle, and the configuration
    keeps this one on loopback.
    """
    tensors, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + bucket_num_bytes([dtype], [shape])
        tensors.append(SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=getattr(torch, dtype),
            start_idx=start, end_idx=end, numel=end - start,
        ))
        start = end
    with _sharing:
        before = multiprocessing.get_sharing_strategy()
        # Host memory is found by its name: a file descriptor would only go to a child of this process.
        multiprocessing.set_sharing_strategy("file_system")
        try:
            payload = ForkingPickler.dumps({"flattened_tensor": bucket.data, "metadata": tensors})
        finally:
            multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(payload).decode()
