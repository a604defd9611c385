"""Shares the memory of a bucket of weights with an SGLang server on the same GPU or, on a CPU, on the same host."""

from __future__ import annotations

import base64
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing as multiprocessing

from async_rl.base.weights.server_admin import Bucket
from async_rl.base.weights.transport import bucket_num_bytes

_sharing = threading.Lock()
"""Held while a bucket is shared, because torch's sharing strategy is a setting of the whole process."""


def share_bucket(bucket: Bucket) -> str:
    """Return the pickle, in base64, with which one SGLang server maps the bucket's memory and finds its tensors.

    SGLang accepts no other format. This process itself reads no pickle.
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
        # The server finds host memory by its name: torch could pass a file descriptor only to a child process.
        multiprocessing.set_sharing_strategy("file_system")
        try:
            payload = ForkingPickler.dumps({"flattened_tensor": bucket.data, "metadata": tensors})
        finally:
            multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(payload).decode()
