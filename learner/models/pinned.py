"""CPU memory that a GPU copies to and from without a detour."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pinned_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in CPU memory that is registered with CUDA until the tensor and all views of it are gone.

    It has pages of its own. In pages of malloc, a tensor that shares the first or last of them would be half
    registered, and so would one that gets the memory next, if it were freed and stayed registered: CUDA refuses to copy
    those ("invalid argument"). torch's own pinned memory is rounded up to powers of two, up to twice the bytes.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes)
    owner = np.frombuffer(memory, np.uint8)
    address = owner.ctypes.data
    cuda = torch.cuda.cudart()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, num_bytes, 0)))
    # A weak reference of the array is called before the array lets go of the memory; at exit all of it is let go.
    weakref.finalize(owner, _unregister, memory, address).atexit = False
    return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def _unregister(memory: mmap.mmap, address: int) -> None:
    """Unregister `memory`, whose reference keeps it mapped until then. Copies under way have to end first."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
