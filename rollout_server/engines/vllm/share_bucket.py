"""Shares the memory of a bucket of weights with a vLLM server on the same GPU or, on a CPU, on the same host."""

from __future__ import annotations

import base64
from typing import Any

from async_rl.weights.bucket import Bucket


def share_bucket(bucket: Bucket) -> dict[str, Any]:
    """Return the handle by which one server maps the bucket's memory, as torch.multiprocessing makes it, but in JSON.

    Call it once for each server: torch counts who maps the memory.
    """
    storage = bucket.data.untyped_storage()
    if bucket.data.is_cuda:
        _, *handle = storage._share_cuda_()  # without the device's index, which may be another one in the server
    else:
        handle = list(storage._share_filename_cpu_())
        storage._shared_incref()  # type: ignore[attr-defined]  # the server takes this count with it
    words = [base64.b64encode(word).decode() if isinstance(word, bytes) else word for word in handle]
    return {"handle": words, "is_bytes": [isinstance(word, bytes) for word in handle]}
