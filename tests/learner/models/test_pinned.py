"""Memory registered with CUDA has pages of its own, and is registered as long as a tensor or a view of it lives."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from learner.loop.optimizer import pinned_zeros


class Registry:
    """Stands for CUDA's runtime, which this host lacks; it refuses what CUDA refuses."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        pages = set(range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)))
        for other, size in self.registered.items():
            assert not pages & set(range(other // mmap.PAGESIZE, -(-(other + size) // mmap.PAGESIZE)))
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registry)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return registry


def test_tensors_share_no_page_and_are_unregistered_with_their_last_view(registry: Registry) -> None:
    tensors = [pinned_zeros((3, 5), torch.float32), pinned_zeros((7,), torch.bfloat16), pinned_zeros((), torch.int64)]
    assert [(t.shape, t.dtype, t.any().item()) for t in tensors] == [
        ((3, 5), torch.float32, False), ((7,), torch.bfloat16, False), ((), torch.int64, False),
    ]  # fmt: skip
    assert registry.registered == {t.data_ptr(): t.nbytes for t in tensors}
    view = tensors[0][1:]
    view += 1
    assert tensors[0].sum() == 10
    of_view = tensors[0].data_ptr()
    del tensors
    gc.collect()
    assert list(registry.registered) == [of_view]
    del view
    gc.collect()
    assert not registry.registered
