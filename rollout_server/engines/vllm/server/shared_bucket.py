"""Maps, in the vLLM server, weights that the learner shares by rollout_server/engines/vllm/admin.py."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor


def map_memory(memory: dict[str, list[Any]], device: torch.device) -> Tensor:
    """Return the memory that the learner's `share_bucket` describes, as a uint8 tensor on `device`; nothing is copied.
    """
    words = zip(memory["handle"], memory["is_bytes"], strict=True)
    handle = [base64.b64decode(word) if is_bytes else word for word, is_bytes in words]
    storage: Any
    if device.type == "cuda":
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)._shared_decref()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
